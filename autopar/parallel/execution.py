"""Run a rank's program: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.compiler.lowered import STEP, Lowered
from autopar.compiler.options import compiler_of
from autopar.errors import CompileError
from autopar.ir.layout import Layout
from autopar.ir.mesh import PIPELINE
from autopar.ir.program import Input, Output
from autopar.ir.schedule import KINDS
from autopar.parallel.agreement import Agreement, Phase
from autopar.parallel.partners import Owners
from autopar.parallel.variants import Constants
from autopar.runtime.distributed import DistributedDriver, Group
from autopar.runtime.executor import Executable, Outputs
from autopar.runtime.outputs import own_memory, shared_outputs
from autopar.runtime.pipeline import Given, RankCode, compile_rank
from autopar.runtime.recorder import Recorder


class Runner(Protocol):
    """A rank's program, ready to run. `source` is the Python that runs, for people to read."""

    @property
    def source(self) -> str: ...

    def run(self, inputs: Iterable[Any]) -> Outputs:
        """The outputs of this rank for the values of the placeholders."""
        ...


@dataclass(frozen=True)
class ExecutorRunner:
    """A program on our executor, over torch.distributed."""

    executable: Executable
    driver: DistributedDriver

    @property
    def source(self) -> str:
        return self.executable.source

    def run(self, inputs: Iterable[Any]) -> Outputs:
        return self.driver.run(self.executable, inputs)

    def record(self, recorder: Recorder | None) -> None:
        self.driver.recorder = recorder


@dataclass(frozen=True)
class PipelineRunner:
    """A rank's instruction list on our executor, over torch.distributed."""

    code: RankCode
    driver: DistributedDriver
    outputs: tuple[Output, ...]
    device: torch.device

    @property
    def source(self) -> str:
        named = self.code.executables.items()
        return "\n".join(f"# {KINDS[kind]} {place}\n{code.source}" for (place, kind), code in named)

    def run(self, inputs: Given) -> Outputs:
        """The outputs of the program, None for those that other ranks have."""
        finals = self.driver.run_pipeline(self.code, inputs, self.device)
        return tuple(finals.get((out.kind, out.name)) for out in self.outputs)

    def record(self, recorder: Recorder | None) -> None:
        self.driver.recorder = recorder


@dataclass(slots=True)
class Running:
    """One compiled signature, ready to run. `shared`: the outputs that are not memory of their own, once known."""

    captured: Captured
    compiled: Lowered
    runner: Runner | PipelineRunner
    slots: tuple[tuple[Input, Layout], ...]
    constants: Constants
    owners: Owners
    shared: frozenset[int] | None = None

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder see what the steps from now on do on this rank; raises CompileError where nothing can."""
        if not isinstance(self.runner, (ExecutorRunner, PipelineRunner)):
            raise CompileError(
                "a trace is of autopar's own executor, and these programs are compiled: leave compile out."
            )
        self.runner.record(recorder)

    def run(self, inputs: list[torch.Tensor] | Given) -> Outputs:
        """The outputs, each in memory of its own; None for those that other stages have."""
        first = self.shared is None
        if isinstance(inputs, Given):
            assert isinstance(self.runner, PipelineRunner)
            outputs = self.runner.run(inputs)
        else:
            assert not isinstance(self.runner, PipelineRunner)
            outputs = self.runner.run(inputs if first else iter(inputs))
        if self.shared is None:
            tensors = inputs.tensors if isinstance(inputs, Given) else inputs
            self.shared = shared_outputs(outputs, tensors)
        return own_memory(outputs, self.shared)


def check_compiler(name: str | None, device: torch.device) -> None:
    """Raise CompileError for a compiler that there is not, or not on this machine."""
    if compiler_of(name) is None:
        return
    from autopar.runtime.inductor import check_toolchain

    check_toolchain(device)


def make_runner(
    compiled: Lowered, groups: Mapping[str, Group], compiler: str | None, agreement: Agreement, device: torch.device
) -> Runner | PipelineRunner:
    """Make a program ready to run. Every rank must call this; where one fails, all raise."""
    program, pipeline = compiled.program, compiled.pipeline
    driver = DistributedDriver(compiled.mesh, groups)
    if pipeline is not None:
        if compiler is not None:
            raise CompileError(
                f"compile={compiler!r} takes steps of one graph; this one is a pipeline (mesh {compiled.mesh}, "
                f"{pipeline.microbatches} micro-batches). Leave compile out, or pp and microbatches."
            )
        code = compile_rank(pipeline, driver.coord.get(PIPELINE, 0), device=device)
        return PipelineRunner(code, driver, program.outputs, device)
    if compiler is None:
        return ExecutorRunner(Executable(program.graph, device=device), driver)
    from autopar.runtime.inductor import compile_program  # and with it Inductor

    rank = dist.get_rank()

    def compile_here(phase: Phase) -> Runner:
        made = compile_program(program, rank, groups, device, STEP)
        # A compiler may reorder. It never did: but ranks that wait for different things would hang.
        phase.texts["order of collectives that Inductor wrote"] = made.collectives
        return made

    return agreement.together("compilation", compile_here)
