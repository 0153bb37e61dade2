"""How a rank's program runs: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.compiler.compiled import STEP, Compiled
from autopar.errors import CompileError
from autopar.ir.layout import Layout
from autopar.ir.plan import PIPELINE
from autopar.ir.program import Input, Output
from autopar.ir.schedule import KINDS
from autopar.parallel.agreement import Agreement
from autopar.parallel.partners import Owners
from autopar.parallel.variants import Constants
from autopar.runtime.distributed import DistributedDriver, Group
from autopar.runtime.executor import Executable, Outputs
from autopar.runtime.pipeline import Given, RankCode, compile_rank
from autopar.runtime.recorder import Recorder

Compiler = Literal["inductor"]
COMPILERS: tuple[Compiler, ...] = ("inductor",)


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
    compiled: Compiled
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


def compiler_of(name: str | None) -> Compiler | None:
    """The compiler of that name; None is our executor. Raises CompileError if there is none."""
    found: Compiler | None = next((compiler for compiler in COMPILERS if compiler == name), None)
    if found is None and name is not None:
        raise CompileError(
            f'compile={name!r}: write "inductor", or leave it out: the programs then run on autopar\'s own executor.'
        )
    return found


def check_compiler(name: str | None, device: torch.device) -> None:
    """Raise CompileError for a compiler that there is not, or not on this machine."""
    if compiler_of(name) is None:
        return
    from autopar.runtime.inductor import check_toolchain

    check_toolchain(device)


def make_runner(
    compiled: Compiled, groups: Mapping[str, Group], compiler: str | None, agreement: Agreement, device: torch.device
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
    made = agreement.together("compilation", lambda: compile_program(program, rank, groups, device, STEP))
    # A compiler may reorder. It never did: but ranks that wait for different things would hang.
    agreement.check("order of collectives that Inductor wrote", made.collectives)
    return made


def shared_outputs(outputs: Outputs, inputs: list[torch.Tensor]) -> frozenset[int]:
    """The outputs that lie in the memory of an input or of an earlier output, or are expanded: the same at each run."""
    given = {_place(tensor)[0] for tensor in inputs}
    seen: set[tuple[int, int]] = set()
    found = set()
    for i, value in enumerate(outputs):
        if value is None:
            continue
        memory, start = _place(value)
        alone = memory not in given and (memory, start) not in seen
        if not (alone and value.is_contiguous()):
            found.add(i)
        seen.add((memory, start))
    return frozenset(found)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, also one without data: torch has one Python object for a storage while that lives."""
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def own_memory(outputs: Outputs, shared: frozenset[int]) -> Outputs:
    """The outputs, those that share memory copied."""
    if not shared:
        return outputs
    dense = torch.contiguous_format
    return tuple(v.clone(memory_format=dense) if i in shared else v for i, v in enumerate(outputs))
