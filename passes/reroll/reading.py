"""A program as the search for loops reads it: equal values are one, and what collects a value of each step is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import semantic_of
from autopar.ir.program import Program, is_getitem, record

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Where one row of a value is taken: of a dim, at an index. keep: the dim stays, of size 1."""

    source: fx.Node
    dim: int
    keep: bool
    index: int

    @property
    def length(self) -> int:
        """How many such rows there are."""
        return record(self.source).type.shape[self.dim]


def piece_of(node: fx.Node) -> RowPiece | None:
    """The row that a node is; None if it is not one row."""
    if node.target is aten.select.int:
        source, dim, index = node.args
        return _piece(source, dim, False, index)
    if node.target is aten.slice.Tensor and len(node.args) >= 4 and record(node).types[0] is not None:
        source, dim, index, *_ = node.args
        assert isinstance(dim, int)
        return _piece(source, dim, True, index or 0) if record(node).type.shape[dim] == 1 else None
    if not is_getitem(node):
        return None
    made, index = node.args
    assert isinstance(made, fx.Node)
    if made.target is aten.unbind.int:
        return _piece(made.args[0], made.args[1] if len(made.args) > 1 else 0, False, index)
    if made.target is aten.split.Tensor and made.args[1] == 1:
        return _piece(made.args[0], made.args[2] if len(made.args) > 2 else 0, True, index)
    return None


def _piece(source: Any, dim: Any, keep: bool, index: Any) -> RowPiece | None:
    shape = record(source).type.shape
    dim %= len(shape)
    return RowPiece(source, dim, keep, index % shape[dim]) if shape[dim] > 1 else None


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A value after some of its rows along a dim were written. rows: by index the place in the chain, and what."""

    base: fx.Node
    dim: int
    place: int
    rows: dict[int, tuple[int, fx.Node]]

    def row(self, index: int) -> fx.Node | None:
        """What was written there."""
        found = self.rows.get(index)
        return found[1] if found and found[0] <= self.place else None


class Reading:
    """The nodes of a program by what they compute.

    same: of each node the first that computes the same. pieces: of those that are rows of a value. written: of the
    `select_scatter`s in a row. sums: of the last of many additions in a row what they add; inner: the others.
    """

    def __init__(self, program: Program, lengths: set[int]) -> None:
        self.program, self.lengths = program, lengths
        self.order = {node: i for i, node in enumerate(program.graph.nodes)}
        self.same: dict[fx.Node, fx.Node] = {}
        self.pieces: dict[fx.Node, RowPiece] = {}
        self.written: dict[fx.Node, WrittenRows] = {}
        self.sums: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.inner: set[fx.Node] = set()
        self._first: dict[Any, fx.Node] = {}
        for node in program.graph.nodes:
            self.same[node] = self._same(node) if node.op == "call_function" else node
        self.users: dict[fx.Node, list[fx.Node]] = {}
        for node, first in self.same.items():
            if node is first:
                for operand in {self.same[one]: None for one in node.all_input_nodes}:
                    self.users.setdefault(operand, []).append(node)
        for node in reversed(program.graph.nodes):
            self._add_up(node)

    def seeds(self) -> Iterator[dict[int, fx.Node]]:
        """The rows of each value of which all, but perhaps one at each end, are taken one by one."""
        nodes: dict[tuple[fx.Node, int, bool], dict[int, fx.Node]] = {}
        for node, piece in self.pieces.items():
            if piece.length in self.lengths:
                nodes.setdefault((piece.source, piece.dim, piece.keep), {})[piece.index] = node
        for rows in nodes.values():
            if len(rows) >= next(self.pieces[node].length for node in rows.values()) - 2:
                yield rows

    def _same(self, node: fx.Node) -> fx.Node:
        piece, semantic = piece_of(node), semantic_of(node.target)
        if piece is not None:
            source = self.same[piece.source]
            chain = self.written.get(source)
            while chain is not None and chain.dim == piece.dim and not piece.keep:
                row = chain.row(piece.index)
                if row is not None:
                    return row
                source = chain.base
                chain = self.written.get(source)
            piece = RowPiece(source, piece.dim, piece.keep, piece.index)
            first = self._first.setdefault(piece, node)
            self.pieces[first] = piece
            return first
        if node.target is aten.select_scatter.default:
            self._write(node)
        if semantic is not None and semantic.random:
            return node
        key = node.target, self._frozen(node.args), self._frozen(tuple(sorted(node.kwargs.items())))
        return self._first.setdefault((*key, record(node).is_backward), node)

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.same[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self._frozen, value))
        return (type(value), value) if isinstance(value, (bool, int, float)) else value

    def _write(self, node: fx.Node) -> None:
        """Note what a `select_scatter` writes, in the chain of those before it."""
        base, row, dim, index = node.args
        assert isinstance(base, fx.Node) and isinstance(row, fx.Node) and isinstance(dim, int)
        shape = record(node).type.shape
        dim %= len(shape)
        assert isinstance(index, int)
        before = self.written.get(base)
        last = before is not None and before.dim == dim and max(place for place, _ in before.rows.values())
        if before is None or before.dim != dim or last != before.place or index % shape[dim] in before.rows:
            before = WrittenRows(self.same[base], dim, -1, {})
        before.rows[index % shape[dim]] = before.place + 1, self.same[row]
        self.written[node] = WrittenRows(before.base, dim, before.place + 1, before.rows)

    def _add_up(self, node: fx.Node) -> None:
        """Note what the additions that end with a node add, if they are many."""
        if node in self.inner or not _is_addition(node):
            return
        leaves, inner, queue = [], [], [node]
        while queue:
            for operand in reversed([self.same[one] for one in queue.pop().all_input_nodes]):
                if _is_addition(operand) and len(self.users[operand]) == 1 and len(operand.users) == 1:
                    inner.append(operand)
                    queue.append(operand)
                else:
                    leaves.append(operand)
        if len(leaves) >= max(min(self.lengths) - 1, 3):
            self.sums[node] = tuple(leaves)
            self.inner.update(inner)


def _is_addition(node: fx.Node) -> bool:
    """True for a sum of two values of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return all(record(one).types == record(node).types for one in node.all_input_nodes)
