"""Runs a LOCAL graph on this process's rank as code that Inductor writes, collectives included.

The graph is traced once more, for the rank at one coordinate: semantic ops become their decompositions, collectives the
functional ones, offsets plain numbers. What comes out is a graph of aten ops, as torch.compile would hand it over. The
program itself stays as it is: Inductor is a way to run it.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import BatchError, CompileError, RankError
from autopar.ir.measure import local_type
from autopar.ir.mesh import Mesh
from autopar.ir.ops import is_mesh_op
from autopar.ir.program import Program
from autopar.ir.ring_ops import is_ring
from autopar.runtime.callables import creates
from autopar.runtime.decompositions import decomposed
from autopar.runtime.executor import Outputs, describe_read, schema_arguments
from autopar.runtime.functional import FunctionalCollectives
from autopar.runtime.groups import Group
from autopar.runtime.inputs import StepInputs
from autopar.runtime.lost import is_loss_of_peer
from autopar.runtime.recorder import Recorder
from autopar.torch_compat import FakeTensorMode, OpOverload, compile_with_inductor, has_cpp_compiler

_COLLECTIVE = re.compile(r"torch\.ops\._c10d_functional\.(?!wait)(\w+)\.\w+\(")


@dataclass(frozen=True)
class InductorProgram:
    """A graph ready to run. `source` is the Python that Inductor wrote, for people to read."""

    function: Callable[..., Outputs]
    source: str
    rank: int

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives in the order in which the code starts them; it must be that of the other ranks."""
        return tuple(_COLLECTIVE.findall(self.source))

    def run(self, inputs: StepInputs) -> Outputs:
        """The outputs of this rank. Raises RankError if the others are lost."""
        with torch.no_grad():
            try:
                return tuple(self.function(*(value.contiguous() for value in inputs.values())))
            except BatchError:
                raise
            except RuntimeError as error:
                line = _failed_line(error)
                if "_c10d_functional" not in line or not is_loss_of_peer(error):
                    error.add_note(f"on rank {self.rank}, in the code that Inductor wrote: {line}")
                    raise
                raise RankError(
                    f"rank {self.rank} lost its peers in the code that Inductor wrote, at\n    {line}\n"
                    f"  Look for the first error of another rank. The backend says: {str(error).strip()}"
                ) from error

    def record(self, recorder: Recorder | None) -> None:
        """Raise CompileError: nothing can watch it."""
        raise CompileError("a trace is of autopar's own executor, and these programs are compiled: leave compile out.")


def compile_program(
    program: Program, rank: int, groups: Mapping[str, Group], device: torch.device, name: str
) -> InductorProgram:
    """Compile a LOCAL program for a rank; moves no data. Raises CompileError, which says `name`, if Inductor fails."""
    mesh = program.mesh
    where = f"graph '{name}' of rank {rank} on mesh '{mesh}' ({len(program.graph.nodes)} nodes)"
    # A ShapeEnv, though no shape is symbolic: without one Inductor keeps nothing in its cache on disk.
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        inputs = [_example(node, mesh, device) for node in program.placeholders]
        interpreter = _RankTrace(program, FunctionalCollectives(mesh, mesh.coord(rank), groups), device)
        try:
            graph = make_fx(interpreter.run)(*inputs)
            function, source = compile_with_inductor(graph, inputs)
        except Exception as error:
            first = str(error).strip().splitlines()
            raise CompileError(
                f"Inductor cannot compile {where}: {type(error).__name__}: {first[0] if first else ''}\n"
                f"  Leave compile= out to run it on autopar's own executor; the traceback above is Inductor's."
            ) from error
    return InductorProgram(function, source, rank)


def check_toolchain(device: torch.device) -> None:
    """Raise CompileError if this machine lacks what Inductor needs to write code for a device."""
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            raise CompileError(
                f'compile="inductor" on {device.type} needs Triton, which is not installed: pip install triton, or '
                f"leave compile= out."
            )
        return
    if not has_cpp_compiler():
        raise CompileError(
            'compile="inductor" needs a C++ compiler, and none was found. Install one (Debian and Ubuntu: apt install '
            "g++; macOS: xcode-select --install; conda: conda install cxx-compiler) or name yours in the environment "
            "variable CXX. Without compile= nothing needs one."
        )


def _example(node: fx.Node, mesh: Mesh, device: torch.device) -> torch.Tensor:
    local = local_type(node, mesh)
    return torch.empty(local.shape, dtype=local.dtype, device=device)


class _RankTrace(fx.Interpreter):
    """Computes a LOCAL graph for one rank, by functions that a compiler can take apart."""

    def __init__(self, program: Program, collectives: FunctionalCollectives, device: torch.device) -> None:
        root = program.graph.owning_module or torch.nn.Module()
        super().__init__(root, graph=program.graph)
        self._collectives, self._device = collectives, device

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and is_mesh_op(n.target):
            values: Any = self.map_nodes_to_values(schema_arguments(n), n)
            return self._collectives.trace(n.target, values)
        if n.op == "call_function" and is_ring(n.target):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._collectives.trace_ring(n.target, args, kwargs)
        if n.op == "call_function" and isinstance(n.target, OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if creates(n.target):
                kwargs = {**kwargs, "device": self._device}
            return decomposed(n.target, describe_read(n))(*args, **kwargs)
        return super().run_node(n)


def _failed_line(error: BaseException) -> str:
    """The line of the generated code at which an error came up: the innermost that calls an op, if one does."""
    trace, lines = error.__traceback__, [""]
    while trace is not None:
        lines.append(linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip())
        trace = trace.tb_next
    return next((line for line in reversed(lines) if "torch.ops." in line), lines[-1])
