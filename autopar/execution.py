"""How a rank's program runs: on our executor, or as code that Inductor writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from autopar.agreement import Agreement
from autopar.capture import Captured
from autopar.compiled import STEP, Compiled
from autopar.errors import CompileError
from autopar.ir.layout import Layout
from autopar.ir.program import Input, Program
from autopar.runtime.distributed import DistributedDriver, Group
from autopar.runtime.executor import Executable, Outputs, compile_graph

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


@dataclass(slots=True)
class Running:
    """One compiled signature, ready to run. `shared`: the outputs that are not memory of their own, once known."""

    captured: Captured
    compiled: Compiled
    runner: Runner
    slots: tuple[tuple[Input, Layout], ...]
    constants: Mapping[str, torch.Tensor]
    shared: frozenset[int] | None = None

    def run(self, inputs: list[torch.Tensor]) -> Outputs:
        """The outputs, each in memory of its own."""
        if self.shared is None:
            outputs = self.runner.run(inputs)
            self.shared = _shared(outputs, inputs)
        else:
            outputs = self.runner.run(iter(inputs))
        if not self.shared:
            return outputs
        dense = torch.contiguous_format
        return tuple(v.clone(memory_format=dense) if i in self.shared else v for i, v in enumerate(outputs))


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
    program: Program, groups: Mapping[str, Group], compiler: str | None, agreement: Agreement, device: torch.device
) -> Runner:
    """Make a LOCAL program ready to run. Every rank must call this; where one fails, all raise."""
    mesh = program.mesh
    if compiler is None:
        return ExecutorRunner(compile_graph(program.graph), DistributedDriver(mesh, groups))
    from autopar.runtime.inductor import compile_program  # and with it Inductor

    rank = dist.get_rank()
    made = agreement.together("compilation", lambda: compile_program(program, rank, groups, device, STEP))
    # A compiler may reorder. It never did: but ranks that wait for different things would hang.
    agreement.check("order of collectives that Inductor wrote", made.collectives)
    return made


def _shared(outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> frozenset[int]:
    """The outputs that lie in the memory of an input or of an earlier output, or are expanded: the same at each run."""
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    seen: set[int] = set()
    found = set()
    for i, value in enumerate(outputs):
        alone = value.untyped_storage().data_ptr() not in given and value.data_ptr() not in seen
        if not (alone and value.is_contiguous()):
            found.add(i)
        seen.add(value.data_ptr())
    return frozenset(found)
