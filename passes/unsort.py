"""unsort: rows that a mixture of experts sorts by expert are computed in their own order instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, Record, TensorType, is_getitem, operand_nodes, record, set_record
from autopar.passes.rules import TABLE, call_of, rule_of
from autopar.passes.rules.rule import Table

MADE_BY = "unsort"

aten = torch.ops.aten

_SORTS = frozenset((aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable))
_ORDERS = frozenset((aten.argsort.default, aten.argsort.stable))
_BLANKS = frozenset((aten.empty_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_empty.default))
_DRAWS = frozenset(("autopar.dropout.default", "autopar.random.default"))  # their results depend on where a row stands


def unsort(program: Program, plan: Plan, table: Table = TABLE) -> Program:
    """CAPTURED -> CAPTURED. A sort whose order nobody sees is left out, so that the rows can be split.

        %sort: (i64[6], i64[6]) = aten.sort.default(%experts)           of each row, in 0..g-1
        %index: f32[6,8] = aten.index.Tensor(%x, [%order])              the rows, sorted
        %expert_mm: f32[6,4] = autopar.expert_mm.default(%index, %w, %sorted)
        %index_1: f32[6,4] = aten.index.Tensor(%expert_mm, [%inverse])  and back again
    becomes
        %expert_mm: f32[6,4] = autopar.expert_mm.default(%x, %w, %experts)

    Sorting mixes rows of different ranks, so that all would be gathered. It is left out if the table of rules proves
    that it changes nothing: between the sort and the way back each op takes the rows one by one (their dim may be
    split at any place), or sums over them. Where that is not so the program stays as it is, right but whole.
    """
    instead: dict[fx.Node, Make] = {}
    moved: set[fx.Node] = set()
    for node in program.calls():
        if node.target in _SORTS and len(record(node).types[0].shape) == 1:  # type: ignore[union-attr]
            found = _Sorted(node, table)
            if found.is_unseen():
                instead |= found.instead
                moved |= found.rows.keys()
    if not instead:
        return program
    build = Builder(MADE_BY)
    for node in program.graph.nodes:
        if node in instead:
            build.value[node] = instead[node](build, node)
        else:
            made = build.copy(node)
            if node in moved:  # another order than in the captured program: its values cannot be compared
                set_record(made, record(node).with_(made_by=MADE_BY, origin=""))
    for made in reversed(build.graph.nodes):
        if made.op == "call_function" and not made.users:
            build.graph.erase_node(made)
    return program.with_(graph=build.graph)


Make = Callable[[Builder, fx.Node], fx.Node]


@dataclass(frozen=True, slots=True)
class _Order:
    """What holds places of rows: the order of the sort, divided by `count`, or its inverse."""

    count: int = 1
    inverse: bool = False


class _Sorted:
    """What becomes of one sort: which values have their rows in its order, and what stands instead of its traces."""

    def __init__(self, sort: fx.Node, table: Table) -> None:
        self.sort, self.table = sort, table
        self.keys: fx.Node = _args(sort)[0]
        self.sorted_keys = {self.keys}  # in any order
        self.size = record(self.keys).type.shape[0]
        self.rows: dict[fx.Node, int] = {}  # values with sorted rows, and the dim of those
        self.orders: dict[fx.Node, _Order] = {}
        self.blanks: set[fx.Node] = set()  # tensors to be written over, of which only the shape was taken
        self.instead: dict[fx.Node, Make] = {}

    def is_unseen(self) -> bool:
        """True if nothing that leaves the program depends on the order of the sort."""
        if self.size < 2 or record(self.keys).type.dtype.is_floating_point or _is_descending(self.sort):
            return False
        self._mark_sort()
        for node in self.sort.graph.nodes:
            if node is self.sort or self._is_marked(node) or self._is_expert(node):
                continue
            if any(map(self._is_marked, node.all_input_nodes)) and not self._follow(node):
                return False
        return bool(self.instead)

    def _is_marked(self, node: fx.Node) -> bool:
        return node in self.rows or node in self.orders or node in self.blanks

    def _mark_sort(self) -> None:
        if self.sort.target in _ORDERS:
            self.orders[self.sort] = _Order()
            return
        for user in self.sort.users:
            if user.args[1] == 0:
                self._stands_for(user, self.keys)
                self.rows[user] = 0
                self.sorted_keys.add(user)
            else:
                self.orders[user] = _Order()

    def _follow(self, node: fx.Node) -> bool:
        """Classify a node that uses a marked value. False if the order shows."""
        if node.op != "call_function":
            return False
        if any(operand in self.orders or operand in self.blanks for operand in operand_nodes(node)):
            return self._follow_order(node)
        return self._follow_rows(node)

    # --- places of rows

    def _follow_order(self, node: fx.Node) -> bool:
        args = _args(node)
        order = self.orders.get(args[0])
        if node.target in _BLANKS:
            self.blanks.add(node)
            return True
        if order is not None and not order.inverse and _is_floor_division(node) and isinstance(args[1], int):
            self.orders[node] = _Order(order.count * args[1])
            return self.size % (order.count * args[1]) == 0
        if order is not None and node.target is aten.remainder.Scalar:
            self.orders[node] = order
            return bool(args[1] == self.size // order.count)
        follow = {
            "aten.index.Tensor": self._taken,
            "aten.index_put.default": self._put,
            "autopar.embedding_backward.default": self._added,
        }.get(str(node.target))
        return follow is not None and follow(node)

    def _taken(self, node: fx.Node) -> bool:
        """x[order]: the rows of x, each `count` times; or back from the order."""
        x, indices = _args(node)
        order = self.orders.get(indices[0]) if len(indices) == 1 else None
        if order is None or x in self.orders or x in self.blanks:
            return False
        if order.inverse:
            return self.rows.get(x) == 0 and self._stands_for(node, x)
        if x in self.rows or record(x).type.shape[0] != self.size // order.count:
            return False
        self.rows[node] = 0
        return self._stands_for(node, x) if order.count == 1 else self._is_made(node, _repeated(x, order.count))

    def _put(self, node: fx.Node) -> bool:
        """base[order] = values: the inverse of the order, or back from the order. Every row of the base is written."""
        base, indices, values, *add = _args(node)
        order = self.orders.get(indices[0]) if len(indices) == 1 else None
        adds = bool(add and add[0])
        if order is None or order.inverse or order.count != 1 or (adds and not _is_zeros(base)):
            return False
        if base in self.rows or base in self.orders or record(base).type.shape[0] != self.size:
            return False
        if _is_range(values, self.size):
            self.orders[node] = _Order(inverse=True)
            return True
        whole = record(values).type.shape == record(node).type.shape
        return whole and self.rows.get(values) == 0 and self._stands_for(node, values)

    def _added(self, node: fx.Node) -> bool:
        """The gradient of x[order]."""
        grad, index, rows, padding = _args(node)
        order = self.orders.get(index)
        if order is None or padding >= 0 or rows != self.size // order.count:
            return False
        if order.inverse:
            if grad in self.rows:
                return False
            self.rows[node] = 0
            return self._stands_for(node, grad)
        if self.rows.get(grad) != 0:
            return False
        return self._stands_for(node, grad) if order.count == 1 else self._is_made(node, _summed(grad, order.count))

    # --- rows

    def _is_expert(self, node: fx.Node) -> bool:
        """The expert of each sorted row, found from where the rows of each expert end. They are counted, added up and
        looked up: the sorted keys again."""
        args = _args(node)
        if node.target is not aten.searchsorted.Tensor or dict(node.kwargs) != {"right": True}:
            return False
        ends = _uncast(args[0])
        if ends.target is not aten.cumsum.default:
            return False
        counts = _uncast(_args(ends)[0])
        if counts.target is not aten.histc.default or not _is_range(args[1], self.size):
            return False
        keys, groups, low, high = (*_args(counts), None, None, None)[:4]
        if _uncast(keys) not in self.sorted_keys or low != 0 or high not in (groups, groups - 1):
            return False
        if record(self.keys).type.dtype != record(node).type.dtype:
            return False
        self.rows[node] = 0
        return self._stands_for(node, self.keys)

    def _follow_rows(self, node: fx.Node) -> bool:
        """An op that takes the rows one by one, or sums over them."""
        if is_getitem(node):
            self.rows[node] = self.rows[_args(node)[0]]
            return True
        call = call_of(node)
        pair = rule_of(call, self.table)
        if pair is None or call.op in _DRAWS:
            return False
        rule = pair[0]
        names = set()
        for operand, dims in zip(operand_nodes(node), rule.operands, strict=True):
            if operand in self.rows:
                names.add(dims[self.rows[operand]])
        name = names.pop()
        if names or len(name) != 1 or name[0] in rule.whole or name[0] in rule.indexed:
            return False
        for operand, dims in zip(operand_nodes(node), rule.operands, strict=True):
            if operand not in self.rows and any(name[0] in dim for dim in dims):
                return False
        places = [[at for at, dim in enumerate(dims) if name[0] in dim] for dims in rule.results]
        if all(not at for at in places):
            return True
        if any(len(at) != 1 or dims[at[0]] != name for at, dims in zip(places, rule.results, strict=True)):
            return False
        self.rows[node] = places[0][0]
        return all(at == places[0] for at in places)

    def _stands_for(self, node: fx.Node, other: fx.Node) -> bool:
        return self._is_made(node, lambda build, _: build.value[other])

    def _is_made(self, node: fx.Node, make: Make) -> bool:
        self.instead[node] = make
        return True


def _repeated(x: fx.Node, count: int) -> Make:
    """Each row `count` times, one after the other."""

    def make(build: Builder, node: fx.Node) -> fx.Node:
        like = record(node).with_(origin="")
        n, *rest = record(x).type.shape
        apart = build.call(aten.unsqueeze.default, build.value[x], 1, like=_shaped(like, n, 1, *rest), name="unsqueeze")
        wide = build.call(
            aten.expand.default, apart, [n, count, *rest], like=_shaped(like, n, count, *rest), name="expand"
        )
        return build.call(aten.reshape.default, wide, [n * count, *rest], like=like, name="reshape")

    return make


def _summed(grad: fx.Node, count: int) -> Make:
    """The sum of each `count` rows."""

    def make(build: Builder, node: fx.Node) -> fx.Node:
        like = record(node)
        n, *rest = like.type.shape
        shape = (n, count, *rest)
        apart = _shaped(like.with_(origin=""), *shape)
        rows = build.call(aten.reshape.default, build.value[grad], list(shape), like=apart, name="reshape")
        return build.call(aten.sum.dim_IntList, rows, [1], like=like, name="sum")

    return make


def _shaped(like: Record, *shape: int) -> Record:
    return like.with_(types=(TensorType(tuple(shape), like.type.dtype),))


def _args(node: fx.Node) -> Any:
    """Its positional arguments, which the op's schema types."""
    return node.args


def _is_descending(sort: fx.Node) -> bool:
    """Of its arguments after the tensor, `stable` and `dim` do not matter: the tensor has one dim."""
    given = _args(sort)[2:] if sort.target in (aten.sort.default, aten.argsort.default) else _args(sort)[1:]
    return bool(sort.kwargs.get("descending")) or any(value is True for value in given)


def _is_floor_division(node: fx.Node) -> bool:
    if node.target is aten.div.Tensor_mode:
        return node.kwargs.get("rounding_mode") == "floor"
    return node.target in (aten.floor_divide.default, aten.floor_divide.Scalar)


def _uncast(node: fx.Node) -> fx.Node:
    while node.target is aten._to_copy.default:
        node = _args(node)[0]
    return node


def _is_range(node: Any, size: int) -> bool:
    """0, 1, ..., size - 1."""
    if not isinstance(node, fx.Node):
        return False
    node = _uncast(node)
    return (node.target, *node.args) in (
        (aten.arange.default, size),
        (aten.arange.start, 0, size),
        (aten.arange.start_step, 0, size),
        (aten.arange.start_step, 0, size, 1),
    )


def _is_zeros(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
