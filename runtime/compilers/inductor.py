"""Runs a LOCAL graph on this process's rank as code that Inductor writes, collectives included: from the graph that
`RankTrace` makes of it. The program itself stays as it is: Inductor is a way to run it."""

from __future__ import annotations

import importlib.util
import linecache
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import BatchError, CompileError
from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.program import Program
from autopar.runtime.compilers.functional import FunctionalCollectives
from autopar.runtime.compilers.rank_trace import RankTrace
from autopar.runtime.executor.executor import Outputs
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.ranks.distributed import Routed
from autopar.runtime.ranks.lost import OTHERS, is_loss_of_peer, loss_of_peers
from autopar.runtime.ranks.process_groups import Group
from autopar.runtime.ranks.recorder import Recorder
from autopar.torch_compat import FakeTensorMode, compile_with_inductor, has_cpp_compiler

_COLLECTIVE = re.compile(r"torch\.ops\._c10d_functional\.(?!wait)(\w+)\.\w+\(")


@dataclass(frozen=True)
class InductorCode:
    """A graph as code that Inductor wrote for a rank. function: of a list of values, which it empties. `source` is the
    Python, for people to read. strides: of its inputs, None for a number. is_general: whether what was taken for
    granted of a number is true of all that it may be."""

    function: Callable[[list[Any]], Outputs]
    source: str
    rank: int
    strides: tuple[tuple[int, ...] | None, ...] = ()
    is_general: bool = True

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives in the order in which the code starts them; it must be that of the other ranks."""
        return tuple(_COLLECTIVE.findall(self.source))

    def run(self, values: list[Any]) -> Outputs:
        """The outputs for values in the strides of the code, or copied to these. Raises RankError if the other ranks
        are lost."""
        given = [value if at is None else _strided(value, at) for value, at in zip(values, self.strides, strict=True)]
        values.clear()  # what dies here is freed after its last use
        try:
            with torch.no_grad():
                return tuple(self.function(given))
        except BatchError:
            raise
        except RuntimeError as error:
            line = _failed_line(error)
            if "_c10d_functional" not in line or not is_loss_of_peer(error):
                error.add_note(f"on rank {self.rank}, in the code that Inductor wrote: {line}")
                raise
            where = f"in the code that Inductor wrote, at\n    {line}"
            raise loss_of_peers(f"rank {self.rank}", where, OTHERS, error) from error


def _strided(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The value in these strides, as it is if it has them."""
    there = zip(value.shape, value.stride(), stride, strict=True)
    if all(size == 1 or mine == wanted for size, mine, wanted in there):
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


@dataclass
class InductorProgram:
    """A program of one graph, as a `Runner`. routes: those whose counts the code gives behind the outputs. recorder:
    sees the code as a whole."""

    code: InductorCode
    routes: tuple[fx.Node, ...] = ()
    recorder: Recorder | None = None
    routed: Sequence[Routed] = ()

    @property
    def source(self) -> str:
        return self.code.source

    def run(self, inputs: StepInputs) -> Outputs:
        with self.recorder.timed("the code that Inductor wrote") if self.recorder is not None else nullcontext():
            outputs = self.code.run(list(inputs.values()))
        count = len(outputs) - len(self.routes)
        self.routed = tuple(zip(self.routes, outputs[count:], strict=True))
        return outputs[:count]

    def record(self, recorder: Recorder | str | None) -> None:
        """Let a recorder see the runs; Inductor's code names its kernels to torch.profiler by itself."""
        self.recorder = recorder if isinstance(recorder, Recorder) else None


@dataclass
class InductorWriter:
    """Has Inductor write code for a rank: once for graphs that are alike."""

    rank: int
    _written: dict[Hashable, InductorCode] = field(default_factory=dict)

    def write(
        self, trace: Callable[..., Any], inputs: Sequence[Any], where: str, holds: Callable[[], bool] = lambda: True
    ) -> tuple[InductorCode, fx.GraphModule]:
        """The code of a function of values like `inputs`, with the graph that was traced of it; within a
        FakeTensorMode. holds: whether the code is general, asked once it is written. Raises CompileError, which says
        `where`, if Inductor fails."""
        strides = tuple(x.stride() if isinstance(x, torch.Tensor) else None for x in inputs)
        try:
            graph = make_fx(trace)(*inputs)
            alike = _alike(graph, inputs)
            if alike is None or alike not in self._written:
                function, source = compile_with_inductor(graph, inputs)
                self._written[alike] = InductorCode(function, source, self.rank, strides, holds())
            return self._written[alike], graph
        except Exception as error:
            first = str(error).strip().splitlines()
            raise CompileError(
                f"Inductor cannot compile {where}: {type(error).__name__}: {first[0] if first else ''}\n"
                f'  compile="executor" runs it op by op; the traceback above is Inductor\'s.'
            ) from error


def _alike(graph: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """What two graphs have in common that compute the same; None for one with tensors of its own."""
    if any(node.op == "get_attr" for node in graph.graph.nodes):
        return None
    types = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None for x in inputs]
    return graph.code, str(types)


def compile_program(
    program: Program, rank: int, groups: Mapping[str, Group], device: torch.device, name: str
) -> InductorProgram:
    """Compile a LOCAL program for a rank; moves no data. Raises CompileError, which says `name`, if Inductor fails."""
    mesh = program.mesh
    # A ShapeEnv, though no shape is symbolic: without one Inductor keeps nothing in its cache on disk.
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        inputs = [example(node, mesh, device) for node in program.placeholders]
        trace = RankTrace(program, FunctionalCollectives(mesh, mesh.coord(rank), groups), device)

        def run(*values: torch.Tensor) -> tuple[Any, ...]:
            return (*trace.run(*values), *trace.routed.values())

        code, _ = InductorWriter(rank).write(run, inputs, where(program, name, rank))
        return InductorProgram(code, tuple(trace.routed))


def where(program: Program, name: str, rank: int) -> str:
    """A graph, as errors call it."""
    return f"graph '{name}' of rank {rank} on mesh '{program.mesh}' ({len(program.graph.nodes)} nodes)"


def example(node: fx.Node, mesh: Mesh, device: torch.device) -> torch.Tensor:
    """A tensor like the value of a node on a rank."""
    local = local_type(node, mesh)
    return torch.empty(local.shape, dtype=local.dtype, device=device)


def check_toolchain(device: torch.device) -> None:
    """Raise CompileError if this machine lacks what Inductor needs to write code for a device."""
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            raise CompileError(
                f'compile="inductor" on {device.type} needs Triton, which is not installed: pip install triton, or '
                f'write compile="executor".'
            )
        return
    if not has_cpp_compiler():
        raise CompileError(
            'compile="inductor" needs a C++ compiler, and none was found. Install one (Debian and Ubuntu: apt install '
            "g++; macOS: xcode-select --install; conda: conda install cxx-compiler) or name yours in the environment "
            "variable CXX. Without compile= nothing needs one."
        )


def _failed_line(error: BaseException) -> str:
    """The line of the generated code at which an error came up: the innermost that calls an op, if one does."""
    trace, lines = error.__traceback__, [""]
    while trace is not None:
        lines.append(linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip())
        trace = trace.tb_next
    return next((line for line in reversed(lines) if "torch.ops." in line), lines[-1])
