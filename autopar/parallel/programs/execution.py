"""Run a rank's program: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture import Captured
from autopar.compiler.batch_rows import BatchRows
from autopar.compiler.lowered import Lowered
from autopar.parallel.agree.agreement import Agreement
from autopar.parallel.programs.bindings import Bindings
from autopar.parallel.programs.compile_together import compiled_pipeline, compiled_program
from autopar.parallel.programs.variants import Constants
from autopar.parallel.session.compilers import kernels_of
from autopar.runtime.executor.executor import Outputs
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.executor.outputs import own_memory, shared_outputs
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import Group
from autopar.runtime.ranks.runner import Runner, executor_runner


@dataclass(slots=True)
class Running:
    """One compiled signature, ready to run. `rows`: of a batch of which ranks have parts. `shared`: the outputs that
    are not memory of their own, once known."""

    captured: Captured
    compiled: Lowered
    runner: Runner
    bound: Bindings
    constants: Constants
    rows: BatchRows | None = None
    shared: frozenset[int] | None = None

    def run(self, inputs: StepInputs) -> Outputs:
        """The outputs, each in memory of its own; None for those that other stages have."""
        outputs = self.runner.run(inputs)
        if self.shared is None:
            self.shared = shared_outputs(outputs, inputs.values())
        return own_memory(outputs, self.shared)


def make_runner(compiled: Lowered, groups: Mapping[str, Group], agreement: Agreement, device: torch.device) -> Runner:
    """Make a program ready to run. Every rank must call this; where one fails, all raise."""
    program, pipeline, driver = compiled.program, compiled.pipeline, DistributedDriver(compiled.mesh, groups)
    compiler = compiled.plan.options.compile
    if compiler != "inductor":
        return executor_runner(program, pipeline, driver, device, kernels=kernels_of(compiler, device))
    if pipeline is None:
        return compiled_program(program, groups, agreement, device)
    return compiled_pipeline(program, pipeline, driver, groups, agreement, device)
