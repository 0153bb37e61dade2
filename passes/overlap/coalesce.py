"""Coalesce collectives: their operands as one flat value, started and awaited once."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh, axes_of_group
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import mesh_op_name, op
from autopar.ir.program import Builder, Record, TensorType, record, set_record

aten = torch.ops.aten
WHOLE: tuple[()] = ()
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Together(Generic[T]):
    """Collectives that move as one. bytes_: of what the largest end of them all holds: operands of sums, results of
    gathers."""

    members: list[T] = field(default_factory=list)
    bytes_: float = 0.0

    def add(self, member: T, bytes_: float) -> None:
        self.members.append(member)
        self.bytes_ += bytes_


class MovesNow(NamedTuple, Generic[T]):
    """What `Buckets` and `Ahead` decide: the collectives that start now, or that are awaited now."""

    starts: bool
    what: Together[T]


class Coalesced:
    """Puts a start, and later a wait, in place of collectives of one kind, over one axis and of one dtype.

    A flat value is made of local pieces and has no global shape of its own. It is [elements] for a sum, and where an
    axis scatters or gathers [ranks, elements], so that what a rank has of it is one row.
    """

    def __init__(self, build: Builder, mesh: Mesh) -> None:
        self.build, self.mesh = build, mesh

    def start(self, nodes: Sequence[fx.Node], reason: str) -> fx.Node:
        """The start of what `nodes`, of the program before, do."""
        first = nodes[0]
        part = self.build.value[first.args[0]]  # type: ignore[index]
        like, args = record(first).with_(reason=reason), self.build.new(first.args[1:])
        if len(nodes) > 1:
            rows = [self._row(node) for node in nodes]
            total, given = self._type(sum(record(row).type.shape[-1] for row in rows), first), record(rows[0]).layout
            like = like.with_(types=(total,), layouts=(given,), origin="")
            dims = () if first.target is op("all_reduce") else (1,)
            part = self.build.lay(aten.cat.default, rows, *dims, like=like, name="flat")
            like = like.with_(layouts=(self._moved(first, given),))
            args = args if first.target is op("all_reduce") else (args[0], 0, 1, *args[3:])
        name = f"{mesh_op_name(first.target)}_start"
        return self.build.lay(op(name), part, *args, like=like, name=name)

    def finish(self, nodes: Sequence[fx.Node], start: fx.Node) -> None:
        """Wait for a start, and put its pieces in the place of `nodes`."""
        like = record(start).with_(reason="")
        wait = self.build.lay(op("wait"), start, like=like, name="wait")
        if len(nodes) == 1:
            self.build.value[nodes[0]] = wait
            return
        sizes = [self._elements(node) for node in nodes]
        dims = () if nodes[0].target is op("all_reduce") else (1,)
        types = tuple(self._type(size, nodes[0]) for size in sizes)
        several = like.with_(types=types, several=True, layouts=like.layouts * len(sizes))
        split = self.build.lay(aten.split_with_sizes.default, wait, sizes, *dims, name="pieces", like=several)
        for i, (node, type_) in enumerate(zip(nodes, types, strict=True)):
            item = self.build.graph.create_node("call_function", operator.getitem, (split, i))
            set_record(item, record(split).with_(types=(type_,), several=False, layouts=like.layouts, operands=()))
            self.build.value[node] = self._piece(item, node)

    def _elements(self, node: fx.Node) -> int:
        """Count the elements of a collective's flat operand, in one row."""
        shape = self._local(node.args[0])
        return math.prod(shape) // (self._ranks(node) if node.target is op("reduce_scatter") else 1)

    def _type(self, elements: int, node: fx.Node) -> TensorType:
        rows = () if node.target is op("all_reduce") else (self._ranks(node),)
        return TensorType((*rows, elements), record(node).type.dtype)

    def _moved(self, node: fx.Node, given: Layout) -> Layout:
        """The layout of a flat value after it moved."""
        axes = _axes(node)
        if node.target is op("all_gather"):
            return Layout((WHOLE, WHOLE), given.partial)
        partial = tuple(pair for pair in given.partial if pair not in {(axis, node.args[-1]) for axis in axes})
        return Layout((axes, WHOLE) if node.target is op("reduce_scatter") else given.dims, partial)

    def _row(self, node: fx.Node) -> fx.Node:
        """A collective's operand, flat."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        partial, type_ = record(operand).layout.partial, self._type(self._elements(node), node)
        value = self.build.value[operand]
        if node.target is op("all_reduce"):
            return self._reshape(value, [-1], type_, Layout((WHOLE,), partial), node)
        if node.target is op("all_gather"):
            return self._reshape(value, [1, -1], type_, Layout((_axes(node), WHOLE), partial), node)
        # [.., outer ranks rest, ..] -> [ranks, (.. outer rest ..)]
        _, _, dim, outer, _ = node.args
        assert isinstance(dim, int) and isinstance(outer, int)
        shape, ranks = list(self._local(operand)), self._ranks(node)
        if dim or outer > 1:
            split = [*shape[:dim], outer, ranks, shape[dim] // (outer * ranks), *shape[dim + 1 :]]
            order = [dim + 1, *(i for i in range(len(split)) if i != dim + 1)]
            value = self._turned(value, split, order, partial, node)
        return self._reshape(value, [ranks, -1], type_, Layout((WHOLE, WHOLE), partial), node)

    def _piece(self, item: fx.Node, node: fx.Node) -> fx.Node:
        """A row as the result of the collective that it stands for."""
        old = record(node)
        shape, name = list(self._local(node)), _PIECES[mesh_op_name(node.target)]
        if node.target is op("all_gather"):
            _, _, dim, outer = node.args
            assert isinstance(dim, int) and isinstance(outer, int)
            if dim or outer > 1:
                ranks = self._ranks(node)
                rest = shape[dim] // (outer * ranks)
                split = [ranks, *shape[:dim], outer, rest, *shape[dim + 1 :]]
                order = [*range(1, dim + 2), 0, *range(dim + 2, len(split))]
                item = self._turned(item, split, order, old.layout.partial, node)
        return self.build.lay(aten.reshape.default, item, shape, like=old.with_(reason=""), name=name)

    def _turned(self, value: fx.Node, shape: list[int], order: list[int], partial: Any, node: fx.Node) -> fx.Node:
        """Read as `shape`, then permuted."""
        layout, dtype = Layout((WHOLE,) * len(shape), partial), record(node).type.dtype
        read = self._reshape(value, shape, TensorType(tuple(shape), dtype), layout, node)
        turned = TensorType(tuple(shape[dim] for dim in order), dtype)
        return self.build.lay(
            aten.permute.default, read, order, name="turned", like=_local(node), type_=turned, layout=layout
        )

    def _reshape(self, value: fx.Node, shape: list[int], type_: TensorType, layout: Layout, node: fx.Node) -> fx.Node:
        like = _local(node)
        return self.build.lay(
            aten.reshape.default, value, shape, like=like, type_=type_, layout=layout, name="flat_part"
        )

    def _local(self, node: Any) -> tuple[int, ...]:
        return local_type(node, self.mesh).shape

    def _ranks(self, node: fx.Node) -> int:
        return self.mesh[str(node.args[1])]


_PIECES = {"all_reduce": "gradient", "reduce_scatter": "gradient", "all_gather": "gathered"}


def _axes(node: fx.Node) -> tuple[str, ...]:
    """The axes over which a collective moves."""
    return axes_of_group(str(node.args[1]))


def _local(node: fx.Node) -> Record:
    """The record of a value made of local pieces, but for its type and layout."""
    return record(node).with_(origin="", reason="")
