"""The graph that a compiler is given: a LOCAL program, traced once more for the rank at one coordinate.

Semantic ops become their decompositions, collectives the functional ones, offsets plain numbers. What comes out is a
graph of aten ops, as torch.compile would hand it over. The program itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import BatchError
from autopar.ir.ops.op_facts import creates
from autopar.ir.ops.ops import NAMESPACE, is_mesh_op, op, whole_of
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.program import Program
from autopar.runtime.collectives.mesh_ops import WAIT
from autopar.runtime.compilers.functional import FunctionalCollectives
from autopar.runtime.executor.executor import describe_read, schema_arguments
from autopar.runtime.executor.kernel_table import KERNELS, function_of
from autopar.runtime.kernels.indices import checked_index, checked_values
from autopar.runtime.kernels.kernel import Function
from autopar.runtime.pipeline.slices import apart, wide
from autopar.torch_compat import OpOverload

_ROUTE = op("route")
_EARLIER, _LATER = op("earlier"), op("later")


@dataclass(slots=True)
class Passing:
    """What a slice of a sequence takes over from the others in a trace, and leaves for them, by key. slice_: its place;
    lengths: of all of them. pieces: of those before it. rests: of sums that later slices left; of the last slice there
    is none."""

    slice_: int = 0
    lengths: Sequence[int] = (1,)
    pieces: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    rests: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    left: dict[str, torch.Tensor] = field(default_factory=dict)

    def earlier(self, x: torch.Tensor, axis: str, dim: int, outer: int, key: str) -> torch.Tensor:
        """Keep a slice's keys and put those of earlier ones before them, as `Carried.earlier` does."""
        self.kept.setdefault(key, x)
        return torch.cat([*self.pieces[key], self.kept[key]], dim)

    def later(self, x: torch.Tensor, axis: str, dim: int, outer: int, key: str) -> torch.Tensor:
        """Add what later slices left and leave the rest for earlier ones, as `Carried.later` does."""
        total, rest = x.to(wide(x.dtype)), self.rests.get(key)
        if rest is not None:
            total = rest + total.narrow(dim, 0, rest.shape[dim])
        mine, left = apart(total, dim, self.lengths, self.slice_)
        if left is not None:
            self.left[key] = left
        return mine.to(x.dtype)


class RankTrace(fx.Interpreter):
    """Computes a LOCAL graph for one rank, by functions that a compiler can take apart. routed: what routes told."""

    def __init__(
        self, program: Program, collectives: FunctionalCollectives, device: torch.device, passing: Passing | None = None
    ) -> None:
        root = program.graph.owning_module or torch.nn.Module()
        super().__init__(root, graph=program.graph)
        self._collectives, self._device, self._passing = collectives, device, passing
        self.routed: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self._value(n)
        route = n.all_input_nodes[0] if n.target == WAIT else n
        if whole_of(route.target) is _ROUTE and (n is not route or n.target is _ROUTE):
            self.routed[route] = value
        return value

    def _value(self, n: fx.Node) -> Any:
        if n.op == "call_function" and is_mesh_op(n.target):
            values: Any = self.map_nodes_to_values(schema_arguments(n), n)
            if self._passing is not None and n.target in (_EARLIER, _LATER):
                return (self._passing.earlier if n.target == _EARLIER else self._passing.later)(*values)
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


# -- decompositions ---------------------------------------------------------------------------------------------------


@torch.library.custom_op(f"{NAMESPACE}::checked_index_copy", mutates_args=())
def checked_index_copy(index: torch.Tensor, size: int, ignored: int | None, least: int, place: str) -> torch.Tensor:
    """`checked_index`, in memory of its own: a compiler takes a result for that. `place` says where it stands."""
    try:
        return checked_index(index, size, ignored, least).clone(memory_format=torch.contiguous_format)
    except BatchError as error:
        raise BatchError(f"{error}\n  In {place}") from None


@checked_index_copy.register_fake
def _(index: torch.Tensor, size: int, ignored: int | None, least: int, place: str) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::checked_values_copy", mutates_args=())
def checked_values_copy(x: torch.Tensor, least: float, most: float, reader: str, place: str) -> torch.Tensor:
    """`checked_values`, in memory of its own."""
    try:
        return checked_values(x, least, most, reader).clone(memory_format=torch.contiguous_format)
    except BatchError as error:
        raise BatchError(f"{error}\n  In {place}") from None


@checked_values_copy.register_fake
def _(x: torch.Tensor, least: float, most: float, reader: str, place: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def decomposed(target: Any, place: str) -> Function:
    """What to trace for a target that is no mesh op: a few semantic ops that fuse with their neighbours (products,
    attention, the cross entropy, lookups); the others are opaque. `place` describes its node, for an error at run time.
    """
    if target == op("checked_index"):
        return lambda index, size, ignored, least=0: checked_index_copy(index, size, ignored, least, place)
    if target == op("checked_values"):
        return lambda x, least, most, reader: checked_values_copy(x, least, most, reader, place)
    kernel = KERNELS.get(target)
    if kernel is None:
        return function_of(target)
    return kernel.traced or (lambda *args, **kwargs: target(*map(_contiguous, args), **kwargs))


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value
