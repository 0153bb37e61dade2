"""Facts on the keys by which rows are sorted: counted and added up, they are the ends of the groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, fill_of, is_check, is_view, is_zeros
from autopar.ir.ops.ops import op_name
from autopar.ir.program import is_getitem, record

aten = torch.ops.aten


class Of(Enum):
    """What a value says of the keys, in whatever order they stand."""

    KEYS = "the keys, of any shape with one dim that counts"
    SORTED = "the sorted keys, found anew"
    HITS = "1 where a row has the group of the column: [n, groups]"
    COUNTS = "how many rows each group has"
    ENDS = "where each group ends, once the rows are sorted"


class Keys:
    """The keys of one sort, and the values that are computed of nothing but them, in whatever order they stand."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.size = node, record(node).type.numel
        self.of: dict[fx.Node, Of] = {node: Of.KEYS}
        while is_view(node.target) and record(args_of(node)[0]).type.numel == self.size:
            node = args_of(node)[0]
            self.of[node] = Of.KEYS

    def learn(self, node: fx.Node) -> Of | None:
        """Find what a value says of the keys, if anything."""
        moves = "same" if is_check(node.target) else facts_of(node.target).moves
        rule = _RULES.get(op_name(node.target)) or _BY_MOVES.get(moves)
        found = rule(self, node) if rule is not None and node.args else None
        if found is not None:
            self.of[node] = Of.KEYS if found is Of.SORTED else found
        return found

    def same(self, node: fx.Node) -> Of | None:
        """A cast, or the keys in another shape."""
        found, type_ = self.of.get(args_of(node)[0]), record(node).type
        keeps = type_.shape == record(args_of(node)[0]).type.shape or (found is Of.KEYS and type_.numel == self.size)
        is_exact = found is Of.HITS or type_.dtype.itemsize >= 4
        return found if keeps and is_exact else None

    def compared(self, node: fx.Node) -> Of | None:
        keys, groups = args_of(node)
        if not isinstance(keys, fx.Node) or not isinstance(groups, fx.Node) or self.of.get(keys) is not Of.KEYS:
            return None
        shape = record(node).type.shape
        is_table = record(keys).type.shape == (self.size, 1) and len(shape) == 2
        return Of.HITS if is_table and is_range(groups, shape[1]) else None

    def tabled(self, node: fx.Node) -> Of | None:
        """zeros[row, keys[row]] = 1, of keys that differ in a row."""
        if op_name(node.target) != "scatter":
            return None
        base, dim, keys, value = args_of(node)
        is_table = is_zeros(base) and dim in (1, -1) and value == 1 and self.of.get(keys) is Of.KEYS
        source = args_of(keys)[0] if is_table and is_getitem(keys) and args_of(keys)[1] == 1 else None
        return Of.HITS if source is not None and op_name(source.target) == "topk" else None

    def summed(self, node: fx.Node) -> Of | None:
        hits, *dims = args_of(node)
        is_sum = self.of.get(hits) is Of.HITS and dims == [[0]]
        return Of.COUNTS if is_sum and record(node).type.dtype.itemsize >= 4 else None

    def counted(self, node: fx.Node) -> Of | None:
        keys, groups, low, high = (*args_of(node), None, None, None)[:4]
        is_count = self.of.get(keys) is Of.KEYS and low == 0 and groups is not None and high in (groups, groups - 1)
        return Of.COUNTS if is_count else None

    def added_up(self, node: fx.Node) -> Of | None:
        """zeros[keys] += 1"""
        values, index, _, base = summands(node)
        if index is not None and is_wrapped(index) and index.args[1] == record(node).type.shape[0]:
            index = args_of(index)[0]
        if index is None or base is not None or self.of.get(index) is not Of.KEYS or fill_of(values) != 1:
            return None
        return Of.COUNTS if record(values).type.shape == record(index).type.shape == (self.size,) else None

    def ends(self, node: fx.Node) -> Of | None:
        return Of.ENDS if self.of.get(args_of(node)[0]) is Of.COUNTS else None

    def group_of(self, node: fx.Node) -> Of | None:
        """The group of each sorted row, found from where the groups end."""
        ends, row = args_of(node)
        is_group = self.of.get(ends) is Of.ENDS and dict(node.kwargs) == {"right": True} and is_range(row, self.size)
        return Of.SORTED if is_group and record(self.node).type.dtype == record(node).type.dtype else None


def args_of(node: fx.Node) -> Any:
    """Its positional arguments, which the op's schema types."""
    return node.args


def summands(node: fx.Node) -> tuple[fx.Node, fx.Node | None, tuple[int, ...], fx.Node | None]:
    """The values and the index of base[index] += values along dim 0, the sizes along which that is repeated, and the
    base if it is not zero."""
    if op_name(node.target) == "embedding_backward":
        values, index, _, padding = args_of(node)
        return values, index if padding < 0 else None, (), None
    base, dim, index, values = args_of(node)[:4]
    is_sum = is_first(dim, base) and not node.kwargs and len(node.args) == 4
    rest = record(values).type.shape[1:] if op_name(node.target) == "scatter_add" else ()
    return values, index if is_sum else None, rest, None if is_zeros(base) else base


def is_wrapped(index: fx.Node) -> bool:
    """Whether an index is taken from the end where it is negative."""
    return index.target is aten.remainder.Scalar


def is_first(dim: int, x: fx.Node) -> bool:
    return dim in (0, -len(record(x).type.shape))


def is_range(node: Any, size: int) -> bool:
    """0, 1, ..., size - 1."""
    while isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return False
    return (node.target, *node.args) in (
        (aten.arange.default, size),
        (aten.arange.start, 0, size),
        (aten.arange.start_step, 0, size),
        (aten.arange.start_step, 0, size, 1),
    )


_RULES: Mapping[str, Callable[[Keys, fx.Node], Of | None]] = {
    "eq": Keys.compared,
    "sum": Keys.summed,
    "histc": Keys.counted,
    "cumsum": Keys.ends,
    "searchsorted": Keys.group_of,
}
_BY_MOVES = {"same": Keys.same, "flat": Keys.same, "added": Keys.added_up, "put": Keys.tabled}
