"""A program of as many rows as nobody compiled, from those of fewer and of more rows."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from torch import fx

from autopar.ir.program import Builder, Program, Record, TensorType, record, set_record

MADE_BY = "between"


class _Differ(Exception):
    """Two programs that are not one with other numbers."""


def between(low: Program, high: Program, share: Fraction) -> Program | None:
    """The program that lies at a share of the way between two, 0 to 1: every size, FLOP and number in an argument on a
    straight line; the first one itself if they are the same. None where they are not node by node the same calls in the
    same layouts, or a number is no integer.
    """
    try:
        return _Between(low, high, share).run()
    except _Differ:
        return None


class _Between:
    def __init__(self, low: Program, high: Program, share: Fraction) -> None:
        self.low, self.high, self.share = low, high, share
        self.build = Builder(MADE_BY)
        self.partner: dict[fx.Node, fx.Node] = {}
        self.is_same = True

    def run(self) -> Program:
        if (self.low.inputs, self.low.outputs) != (self.high.inputs, self.high.outputs):
            raise _Differ
        for node, other in zip_longest(self.low.graph.nodes, self.high.graph.nodes):
            if node is None or other is None or (node.op, node.target) != (other.op, other.target):
                raise _Differ
            self.partner[node] = other
            self._put(node, other)
        return self.low if self.is_same else self.low.with_(graph=self.build.graph)

    def _put(self, node: fx.Node, other: fx.Node) -> None:
        known, is_same, self.is_same = self._record(record(node), record(other)), self.is_same, True
        args, kwargs = self._arg(node.args, other.args), self._arg(dict(node.kwargs), dict(other.kwargs))
        if self.is_same:
            self.build.copy(node, like=known)
        else:
            made = self.build.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            set_record(made, known)
            self.build.value[node] = made
        self.is_same &= is_same

    def _record(self, low: Record, high: Record) -> Record:
        if (low.layouts, low.operands, low.phase) != (high.layouts, high.operands, high.phase):
            raise _Differ
        types = tuple(self._types(low, high))
        return low if types == low.types and low.flops == high.flops else low.with_(
            types=types, flops=self._number(low.flops, high.flops)
        )  # fmt: skip

    def _types(self, low: Record, high: Record) -> Iterator[TensorType | None]:
        for one, two in zip_longest(low.types, high.types):
            if one is None or two is None or one.dtype != two.dtype or len(one.shape) != len(two.shape):
                if one is not two:
                    raise _Differ
                yield one
            else:
                yield TensorType(tuple(map(self._number, one.shape, two.shape)), one.dtype)

    def _arg(self, low: Any, high: Any) -> Any:
        if isinstance(low, fx.Node):
            if self.partner.get(low) is not high:
                raise _Differ
            return self.build.value[low]
        if type(low) is not type(high):
            raise _Differ
        if isinstance(low, (tuple, list)):
            if len(low) != len(high):
                raise _Differ
            return tuple(map(self._arg, low, high)) if isinstance(low, tuple) else list(map(self._arg, low, high))
        if isinstance(low, dict):
            if list(low) != list(high):
                raise _Differ
            return {name: self._arg(value, high[name]) for name, value in low.items()}
        return self._number(low, high)

    def _number(self, low: Any, high: Any) -> Any:
        if low == high:
            return low
        self.is_same = False
        if isinstance(low, float):  # a mean's 1 / rows: it costs nothing
            return low
        if not isinstance(low, int) or isinstance(low, bool):
            raise _Differ
        found = low + (high - low) * self.share
        if found.denominator != 1:
            raise _Differ
        return found.numerator
