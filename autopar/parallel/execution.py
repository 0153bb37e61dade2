"""Run a rank's program: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.compiler.lowered import STEP, Lowered
from autopar.errors import CompileError
from autopar.ir.options import Compiler
from autopar.parallel.agreement import Agreement, Phase
from autopar.parallel.bindings import Bindings
from autopar.parallel.variants import Constants
from autopar.runtime.distributed import DistributedDriver
from autopar.runtime.executor import Outputs
from autopar.runtime.groups import Group
from autopar.runtime.inputs import StepInputs
from autopar.runtime.outputs import own_memory, shared_outputs
from autopar.runtime.runner import Runner, executor_runner


@dataclass(slots=True)
class Running:
    """One compiled signature, ready to run. `shared`: the outputs that are not memory of their own, once known."""

    captured: Captured
    compiled: Lowered
    runner: Runner
    bound: Bindings
    constants: Constants
    shared: frozenset[int] | None = None

    def run(self, inputs: StepInputs) -> Outputs:
        """The outputs, each in memory of its own; None for those that other stages have."""
        outputs = self.runner.run(inputs)
        if self.shared is None:
            self.shared = shared_outputs(outputs, inputs.values())
        return own_memory(outputs, self.shared)


def check_compiler(name: Compiler | None, device: torch.device) -> None:
    """Raise CompileError for a compiler that is not to be had on this machine."""
    if name == "inductor":
        from autopar.runtime.inductor import check_toolchain

        check_toolchain(device)


def make_runner(compiled: Lowered, groups: Mapping[str, Group], agreement: Agreement, device: torch.device) -> Runner:
    """Make a program ready to run. Every rank must call this; where one fails, all raise."""
    program, pipeline = compiled.program, compiled.pipeline
    if compiled.plan.options.compile != "inductor":
        return executor_runner(program, pipeline, DistributedDriver(compiled.mesh, groups), device)
    if pipeline is not None:
        raise CompileError(
            f'compile="inductor" takes steps of one graph; this one is a pipeline (mesh {compiled.mesh}, '
            f"{pipeline.parts_text}). Leave compile out, or pp and microbatches."
        )
    from autopar.runtime.inductor import compile_program  # and with it Inductor

    rank = dist.get_rank()

    def compile_here(phase: Phase) -> Runner:
        made = compile_program(program, rank, groups, device, STEP)
        # A compiler may reorder. It never did: but ranks that wait for different things would hang.
        phase.texts["order of collectives that Inductor wrote"] = made.collectives
        return made

    return agreement.together("compilation", compile_here)
