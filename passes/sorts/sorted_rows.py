"""What is known of values once rows are sorted by their keys: which are places of rows, which have sorted rows.

`unsort` asks it whether anybody sees the order of a sort, and what may stand instead of what does not show it.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, fill_of, is_check, is_zeros, made_of
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import Builder, is_getitem, operand_nodes, record
from autopar.passes.rules import call_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.through import through
from autopar.passes.sorts.sorted_keys import Keys, Of, args_of, is_first, is_range, is_wrapped, summands

aten = torch.ops.aten

Make = Callable[[Builder, fx.Node], fx.Node]


# What is known of a value, of n rows that are sorted by their keys. The first three depend on the order.


@dataclass(frozen=True, slots=True)
class Order:
    """Places of rows: the permutation of the sort, divided by `count`, or its inverse; repeated along later dims."""

    count: int = 1
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class RowsInOrder:
    """Rows that stand in the order of the sort, along a dim."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Blank:
    """To be written over: of an order only the shape is taken."""


class SortedRows:
    """What becomes of one sort: facts about values, and what stands instead of the traces of its order. places: of all
    nodes in their graph. draws: rows may be told the places by which they draw."""

    def __init__(self, sort: fx.Node, table: Table, places: Mapping[fx.Node, int], draws: bool = False) -> None:
        self.sort, self.table, self.places, self.draws = sort, table, places, draws
        self.keys = Keys(args_of(sort)[0])
        self.size = self.keys.size
        self.facts: dict[fx.Node, Order | RowsInOrder | Blank] = {}
        self.sorts: list[fx.Node] = []  # this one, and those of its orders
        self.instead: dict[fx.Node, Make] = {}
        self._place: fx.Node | None = None  # of rows in the order of the sort, once it is made

    def is_unseen(self) -> bool:
        """True if nothing that leaves the program depends on the order of the sort."""
        if self.size < 2 or record(self.keys.node).type.dtype.is_floating_point or not self._is_sort(self.sort):
            return False
        self._sort_gives(self.sort, Order())
        # What hangs on the keys or on the order, as the program has it: of a model with many layers that is little.
        known = (user for node in (*self.keys.of, self.sort) for user in node.users)
        pending = [(self.places[node], node) for node in dict.fromkeys(known)]
        heapq.heapify(pending)
        reached = {node for _, node in pending}
        while pending:
            _, node = heapq.heappop(pending)
            if not self._take(node):
                return False
            if node in self.facts or node in self.sorts or node in self.keys.of or is_wrapped(node):
                for user in node.users:
                    if user not in reached:
                        reached.add(user)
                        heapq.heappush(pending, (self.places[user], user))
        return bool(self.instead)

    def _take(self, node: fx.Node) -> bool:
        """Find what there is to know of a value. False if the order shows."""
        if node in self.facts or node in self.sorts:
            return True
        if self.keys.learn(node) is Of.SORTED:
            self._is_sorted_keys(node)
        is_touched = node not in self.facts and any(operand in self.facts for operand in node.all_input_nodes)
        return not is_touched or self._follow(node)

    def _is_sort(self, node: fx.Node) -> bool:
        """From the smallest to the largest, of all rows. Of the other arguments none matters to a tensor of one dim."""
        values, *rest = args_of(node)
        if record(values).type.shape != (self.size,):
            return False
        if op_name(node.target) == "topk":
            said = dict(zip(("k", "dim", "largest", "sorted"), rest, strict=False)) | node.kwargs
            return said["k"] == self.size and said.get("largest") is False and said.get("sorted") is not False
        if str(node.target) in ("aten.sort.default", "aten.argsort.default"):
            rest = rest[1:]  # the dim
        return not node.kwargs.get("descending") and not any(value is True for value in rest)

    def _sort_gives(self, node: fx.Node, order: Order) -> None:
        """The results of a sort: the sorted keys, or 0..n-1 if it sorts places; and their order."""
        self.sorts.append(node)
        if op_name(node.target) == "argsort":
            self.facts[node] = order
            return
        for user in node.users:
            if user.args[1] == 1:
                self.facts[user] = order
            elif node is self.sort:
                self._is_sorted_keys(user)
            else:
                self._is_arange(user)

    def _is_sorted_keys(self, node: fx.Node) -> None:
        self.facts[node], self.keys.of[node] = RowsInOrder(), Of.KEYS
        self._stands_for(node, self.keys.node)

    def _follow(self, node: fx.Node) -> bool:
        """Find the fact about a value that uses one with a fact. False if the order shows."""
        if node.op != "call_function":
            return False
        if all(isinstance(self.facts.get(operand, RowsInOrder()), RowsInOrder) for operand in node.all_input_nodes):
            return self._searched(node) if op_name(node.target) == "searchsorted" else self._row_by_row(node)
        if made_of(node.target):
            return self._blank(node)
        rule = _RULES.get(op_name(node.target)) or _BY_MOVES.get(
            "same" if is_check(node.target) else facts_of(node.target).moves
        )
        return rule is not None and rule(self, node)

    # --- places of rows

    def _order(self, index: fx.Node, *rest: int) -> Order | None:
        """The order that an index holds, repeated along dims of the sizes `rest`."""
        order = self.facts.get(index)
        return order if isinstance(order, Order) and record(index).type.shape == (self.size, *rest) else None

    def _blank(self, node: fx.Node) -> bool:
        self.facts[node] = Blank()
        return True

    def resorted(self, node: fx.Node) -> bool:
        """argsort(order): the inverse, and the other way round."""
        order = self._order(args_of(node)[0])
        if order is None or order.count != 1 or not self._is_sort(node):
            return False
        self._sort_gives(node, Order(inverse=not order.inverse))
        return True

    def divided(self, node: fx.Node) -> bool:
        """order // count: the token of each row."""
        order, divisor = self.facts.get(args_of(node)[0]), args_of(node)[1]
        # places are not negative: both ways to round are one
        is_whole = op_name(node.target) == "floor_divide" or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if not isinstance(order, Order) or order.inverse or not is_whole or not isinstance(divisor, int):
            return False
        self.facts[node] = Order(order.count * divisor)
        return divisor > 0 and self.size % (order.count * divisor) == 0

    def wrapped(self, node: fx.Node) -> bool:
        """order % rows: the order itself."""
        order, divisor = self.facts.get(args_of(node)[0]), args_of(node)[1]
        if not isinstance(order, Order) or divisor != self.size // order.count:
            return False
        self.facts[node] = order
        return True

    def reshaped(self, node: fx.Node) -> bool:
        """A cast, or a view that keeps the rows' dim and repeats the order along those after it."""
        source = args_of(node)[0]
        order, given, made = self.facts.get(source), record(source).type.shape, record(node).type
        keeps = len(made.shape) == len(given) if op_name(node.target) == "expand" else made.numel == math.prod(given)
        is_place = not made.dtype.is_floating_point and made.dtype.itemsize >= 4
        if not isinstance(order, Order) or not is_place or not keeps or made.shape[:1] != given[:1]:
            return False
        is_shaped = facts_of(node.target).moves == "flat" and op_name(node.target) != "unsqueeze"
        if is_shaped and math.prod(given) != self.size:
            return False
        self.facts[node] = order
        return True

    def taken(self, node: fx.Node) -> bool:
        """x[order]: the rows of x, each `count` times; or back from the order."""
        x, index = _looked_up(node)
        rest = record(node).type.shape[1:] if op_name(node.target) == "gather" else ()
        order = None if index is None else self._order(index, *rest)
        of = self.facts.get(x)
        if order is None or (rest and record(x).type.shape[1:] != rest):
            return False
        if isinstance(of, Order):
            is_flat = record(x).type.shape == (self.size,)
            return is_flat and {of, order} == {Order(), Order(inverse=True)} and self._is_arange(node)
        if order.inverse:
            return of == RowsInOrder() and self._stands_for(node, x)
        if of is not None or record(x).type.shape[0] != self.size // order.count:
            return False
        self.facts[node] = RowsInOrder()
        if self.keys.of.get(x) is Of.KEYS and order.count == 1:
            self.keys.of[node] = Of.KEYS
        return self._stands_for(node, x) if order.count == 1 else self._is_made(node, _repeated(x, order.count))

    def put(self, node: fx.Node) -> bool:
        """base[order] = values: the inverse of the order, or back from the order. Every row of the base is written."""
        base, index, values, adds = _written(node)
        type_ = record(node).type
        rest = type_.shape[1:] if op_name(node.target) == "scatter" else ()
        order = None if index is None or node.kwargs else self._order(index, *rest)
        if (
            not isinstance(values, fx.Node)
            or order is None
            or order.count != 1
            or type_.shape[0] != self.size
            or (adds and not is_zeros(base))
        ):
            return False
        if type_.shape == (self.size,) and is_range(values, self.size):
            self.facts[node] = Order(inverse=not order.inverse)
            return True
        if record(values).type.shape != type_.shape or self.facts.get(values) != (
            None if order.inverse else RowsInOrder()
        ):
            return False
        if order.inverse:
            self.facts[node] = RowsInOrder()
        return self._stands_for(node, values)

    def _searched(self, node: fx.Node) -> bool:
        """How many rows have a key of 0 to each number: where groups end."""
        keys, numbers = args_of(node)
        (count,) = record(node).type.shape or (0,)
        is_sorted = self.facts.get(keys) == RowsInOrder() and self.keys.of.get(keys) is Of.KEYS
        if not is_sorted or not is_range(numbers, count) or dict(node.kwargs) != {"right": True}:
            return False

        def make(build: Builder, node: fx.Node) -> fx.Node:
            like = record(node)
            column = build.infer(aten.unsqueeze.default, build.value[self.keys.node], 1, like=like)
            below = build.infer(aten.le.Tensor, column, build.value[numbers], like=like)
            return build.infer(aten.sum.dim_IntList, below, [0], like=like, name=node.name)

        self.keys.of[node] = Of.ENDS
        return self._is_made(node, make)

    def added(self, node: fx.Node) -> bool:
        """base[order] += values: the sum of each token's rows; of zeros also the gradient of x[order]."""
        values, index, rest, base = summands(node)
        shape = record(node).type.shape
        order = None if index is None else self._order(index, *rest)
        if order is None or shape[0] != self.size // order.count or record(values).type.shape[1:] != shape[1:]:
            return False
        fact = self.facts.get(values)
        if order.inverse:
            self.facts[node] = RowsInOrder()
            return fact is None and base is None and self._stands_for(node, values)
        if fact != RowsInOrder() or base in self.facts:
            return False
        if base is not None or order.count > 1:
            return self._is_made(node, _summed(values, order.count, base))
        return self._stands_for(node, values)

    # --- rows

    def _row_by_row(self, node: fx.Node) -> bool:
        """An op that takes the rows one by one, or sums over them."""
        if is_getitem(node):
            self.facts[node] = self.facts[args_of(node)[0]]
            return True
        operands = operand_nodes(node)
        if self.draws and node.target is op("dropout") and self.facts.get(operands[0]) == RowsInOrder():
            self.facts[node] = RowsInOrder()
            return self._is_made(node, self._dropped)
        known = {
            i: (fact.dim, 1) for i, one in enumerate(operands) if isinstance(fact := self.facts.get(one), RowsInOrder)
        }
        found = through(call_of(node), known, self.table, self.size, adds=False)
        if isinstance(found, str):
            return False
        unknown = [operands[i] for i, at in enumerate(found.operands) if at is not None and i not in known]
        if any(fill_of(one) is None for one in unknown):  # one number everywhere has any order
            return False
        if not any(found.results):
            return True
        (at, *others), type_ = set(found.results), record(node).types[0]
        if others or at is None or type_ is None or type_.shape[at[0]] != self.size:
            return False
        self.facts[node] = RowsInOrder(at[0])
        return True

    def _dropped(self, build: Builder, node: fx.Node) -> fx.Node:
        """Dropout of rows in their own order, which draw by their places in the order of the sort: its inverse."""
        x, seed, key, p, whole, *_ = args_of(node)
        like = record(node).with_(origin="")  # in another order than in the captured program
        if self._place is None:
            order = build.value[self.sort]
            if op_name(self.sort.target) != "argsort":
                order = build.infer(operator.getitem, order, 1, like=like)
            inverse = build.infer(aten.sort.stable, order, like=like, stable=True, dim=0)
            self._place = build.infer(operator.getitem, inverse, 1, like=like, name="place")
        keys = build.value[self.keys.node]
        return build.infer(
            op("dropout_of_rows"), build.value[x], build.value[seed], key, 0, p, self._place, keys,
            whole, whole[1:], [0] * (len(whole) - 1), like=like, name=node.name,
        )  # fmt: skip

    def _is_arange(self, node: fx.Node) -> bool:
        def make(build: Builder, node: fx.Node) -> fx.Node:
            known = record(node)
            return build.call(aten.arange.default, self.size, dtype=known.type.dtype, like=known, name="arange")

        return self._is_made(node, make)

    def _stands_for(self, node: fx.Node, other: fx.Node) -> bool:
        return self._is_made(node, lambda build, _: build.value[other])

    def _is_made(self, node: fx.Node, make: Make) -> bool:
        self.instead[node] = make
        return True


def _repeated(x: fx.Node, count: int) -> Make:
    """Each row `count` times, one after the other."""

    def make(build: Builder, node: fx.Node) -> fx.Node:
        like = record(node)
        n, *rest = record(x).type.shape
        apart = build.infer(aten.unsqueeze.default, build.value[x], 1, like=like, name="unsqueeze")
        wide = build.infer(aten.expand.default, apart, [n, count, *rest], like=like, name="expand")
        return build.infer(aten.reshape.default, wide, [n * count, *rest], like=like, name="reshape")

    return make


def _summed(grad: fx.Node, count: int, base: fx.Node | None) -> Make:
    """The sum of each `count` rows, and of what is there already."""

    def make(build: Builder, node: fx.Node) -> fx.Node:
        like = record(node)
        n, *rest = like.type.shape
        rows = build.value[grad]
        if count > 1:
            rows = build.infer(aten.reshape.default, rows, [n, count, *rest], like=like, name="reshape")
            rows = build.call(aten.sum.dim_IntList, rows, [1], like=like, name="sum")
        return rows if base is None else build.call(aten.add.Tensor, build.value[base], rows, like=like, name="add")

    return make


Looked = tuple[fx.Node, fx.Node | None]


def _looked_up(node: fx.Node) -> Looked:
    """x and the index of x[index], along dim 0."""
    x, *rest = args_of(node)
    if op_name(node.target) == "index":
        return x, rest[0][0] if len(rest[0]) == 1 else None
    return x, rest[1] if is_first(rest[0], x) else None


def _written(node: fx.Node) -> tuple[fx.Node, fx.Node | None, Any, bool]:
    """The base, the index, the values of base[index] = values along dim 0; True if they are added."""
    base, *rest = args_of(node)
    if op_name(node.target) == "index_put":
        indices, values, *add = rest
        return base, indices[0] if len(indices) == 1 else None, values, bool(add and add[0])
    return base, rest[1] if is_first(rest[0], base) else None, rest[2], False


# What an op makes of the order of a sort, by what it is or by how it moves elements. What is not here shows the order.
_RULES: Mapping[str, Callable[[SortedRows, fx.Node], bool]] = {
    "div": SortedRows.divided,
    "floor_divide": SortedRows.divided,
    "remainder": SortedRows.wrapped,
}
_BY_MOVES: Mapping[str, Callable[[SortedRows, fx.Node], bool]] = {
    **dict.fromkeys(("same", "flat", "repeated"), SortedRows.reshaped),
    "taken": SortedRows.taken,
    "put": SortedRows.put,
    "added": SortedRows.added,
    "sorted": SortedRows.resorted,
}
