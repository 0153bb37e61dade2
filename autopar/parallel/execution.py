"""Run a rank's program: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.compiler.lowered import STEP, Lowered
from autopar.ir.mesh import PIPELINE
from autopar.ir.options import Compiler
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program
from autopar.parallel.agreement import Agreement, Phase
from autopar.parallel.bindings import Bindings
from autopar.parallel.variants import Constants
from autopar.runtime.distributed import DistributedDriver
from autopar.runtime.executor import Outputs
from autopar.runtime.fused import kernels_for
from autopar.runtime.groups import Group
from autopar.runtime.inputs import StepInputs
from autopar.runtime.outputs import own_memory, shared_outputs
from autopar.runtime.pipeline import RankCode
from autopar.runtime.runner import PipelineRunner, Runner, executor_runner
from autopar.settings import Settings

# A compiler may reorder. It never did: but ranks that wait for different things would hang.
_ORDER = "order of collectives that Inductor wrote"


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
    elif name == "triton":
        from autopar.runtime.triton import toolchain

        toolchain.check_toolchain(device, Settings.read().interpret)


def make_runner(compiled: Lowered, groups: Mapping[str, Group], agreement: Agreement, device: torch.device) -> Runner:
    """Make a program ready to run. Every rank must call this; where one fails, all raise."""
    program, pipeline, driver = compiled.program, compiled.pipeline, DistributedDriver(compiled.mesh, groups)
    compiler = compiled.plan.options.compile
    if compiler != "inductor":
        settings = Settings.read()
        kernels = kernels_for(compiler, device, settings.interpret, settings.kernels)
        return executor_runner(program, pipeline, driver, device, kernels=kernels)
    if pipeline is None:
        return _compiled_program(program, groups, agreement, device)
    return _compiled_pipeline(program, pipeline, driver, groups, agreement, device)


def _compiled_program(
    program: Program, groups: Mapping[str, Group], agreement: Agreement, device: torch.device
) -> Runner:
    def compile_here(phase: Phase) -> Runner:
        from autopar.runtime.inductor import compile_program  # and with it Inductor

        made = compile_program(program, dist.get_rank(), groups, device, STEP)
        phase.texts[_ORDER] = made.code.collectives
        return made

    return agreement.together("compilation", compile_here)


def _compiled_pipeline(
    program: Program, pipeline: Pipeline, driver: DistributedDriver, groups: Mapping[str, Group],
    agreement: Agreement, device: torch.device,
) -> Runner:  # fmt: skip
    """Only ranks at the same place of the pipeline compile the same graphs."""

    def compile_here(phase: Phase) -> tuple[RankCode, Mapping[str, Sequence[str]]]:
        from autopar.runtime.inductor_stages import compile_stages

        return compile_stages(pipeline, driver.rank, groups, device)

    code, collectives = agreement.together("compilation", compile_here)
    lines = [f"{graph}: {name}" for graph, names in collectives.items() for name in names]
    agreement.check_within(_ORDER, driver.coord.get(PIPELINE, 0), lines)
    return PipelineRunner(code, driver, program.outputs, device)
