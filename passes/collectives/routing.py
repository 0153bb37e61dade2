"""Which index rows follow to their owners, and the calls that find and make their way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from autopar.errors import LayoutError
from autopar.ir.layout import Factor, Layout, pieces
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import op
from autopar.ir.program import Builder, Program, Record, TensorType, is_getitem, operand_nodes, record
from autopar.passes.rules import Rules, call_of
from autopar.passes.rules.rule import Table

SAID = 3  # numbers behind the counts of a route, that tell of experts that do not exist


class Routing:
    """By which index rows went to their owners: values that calls connect there went alike. factor: as of
    `StepOptions.expert_rows`."""

    def __init__(self, program: Program, table: Table, factor: float | None = None) -> None:
        self.mesh, self.factor = program.mesh, factor
        self._parent: dict[fx.Node, fx.Node] = {}
        self._index: dict[fx.Node, fx.Node] = {}  # by the root of what is connected
        self.groups: dict[fx.Node, int] = {}  # how many owners an index tells apart
        self._user: dict[fx.Node, Record] = {}  # of an index: a product by it
        self._first: dict[fx.Node, fx.Node] = {}  # of each index the first that is the same
        self._routes: dict[tuple[fx.Node, tuple[Factor, ...], str], tuple[fx.Node, fx.Node, tuple[int, ...]]] = {}
        sent: dict[fx.Node, list[fx.Node]] = {}  # the users to whom rows of a value go where their owners are
        nodes = [node for node in program.calls() if _is_owned(node) or any(one.owned for one in record(node).operands)]
        for node in nodes:
            self._parent.setdefault(node, node)
            for operand in _with_owners(node):
                if _is_owned(operand):
                    self._parent[self._root(operand)] = self._root(node)
                else:
                    sent.setdefault(operand, []).append(node)
        rules = Rules(table)
        for node in nodes:
            pair = None if is_getitem(node) else rules.of(call_of(node))
            if pair and pair[0].owned:
                self._learn(node, operand_nodes(node)[pair[0].owners_index], pair[0].sizes[pair[0].owned[1]])
        for node in nodes:
            if self._root(node) not in self._index:
                self._follow(node, sent)

    def _follow(self, node: fx.Node, sent: Mapping[fx.Node, list[fx.Node]]) -> None:
        """Give calls that no product by expert is among the index of one that is sent a row of theirs as well."""
        others = (self._root(user) for operand in _with_owners(node) for user in sent.get(operand, ()))
        index = next((self._index[root] for root in others if root in self._index), None)
        if index is not None:
            self._index[self._root(node)] = index

    def _learn(self, node: fx.Node, index: fx.Node, groups: int) -> None:
        known = self._index.setdefault(self._root(node), index)
        self.groups.setdefault(index, groups)
        self._user.setdefault(index, record(node))
        self._first[index] = known
        if not _is_same(known, index):
            first, second = (f"%{one.name} ({record(one).source})" for one in (known, index))
            raise LayoutError(
                f"rows that went to their experts by {first} are multiplied by those of {second}, at "
                f"{record(node).source} in {record(node).module}: one layer has one index. Use the same one for all "
                f"matrices of an expert."
            )

    def index_of(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """The index by which the rows of a value are with their owners, or go there for a user."""
        return self._index[self._root(node if _is_owned(node) else user)]

    def is_index(self, node: fx.Node, index: fx.Node) -> bool:
        """True for an index, and for one that was computed in the same way once more."""
        return self._first.get(node) is index

    def _root(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def route(
        self, build: Builder, index: fx.Node, value: fx.Node, axis: str
    ) -> tuple[fx.Node, fx.Node, tuple[int, ...]]:
        """The order of an index' rows by owner, how many go where, and how many may, if that is bounded: found once.
        value: the index as it lies."""
        found = record(value)
        (dim,) = found.layout.dims
        key = index, dim, axis
        if key not in self._routes:
            groups, ranks = self.groups[index], self.mesh[axis]
            at = found if found.source else self._user[index]  # the batch may tell the experts
            why = "rows go to the ranks of their experts, and back"
            module = self._user[index].module
            like = found.with_(flops=0, origin="", reason=why, source=at.source, module=module)
            order = TensorType(found.type.shape, torch.int64)
            apart = tuple(factor for factor in dim if isinstance(factor, str))
            bound: tuple[int, ...] = ()
            columns = groups // ranks
            if self.factor is not None:
                mean = found.type.shape[0] // pieces(dim, self.mesh) / ranks
                bound, columns = (math.ceil(self.factor * mean),), columns + SAID
            counts = TensorType((pieces(dim, self.mesh) * 2 * ranks, columns), torch.int64)
            sorts = (groups, *bound) if bound else ()
            self._routes[key] = (
                build.lay(
                    op("order_by_owner"), value, axis, *sorts, like=like, type_=order, layout=found.layout, name="order"
                ),
                build.lay(
                    op("route"), value, axis, groups, *bound, like=like, type_=counts, layout=Layout((apart, ())),
                    name="route",
                ),
                bound,
            )  # fmt: skip
        return self._routes[key]


def _with_owners(node: fx.Node) -> list[fx.Node]:
    """The operands whose rows a call wants to be with their owners."""
    if is_getitem(node):
        return [operand for operand in node.all_input_nodes if _is_owned(operand)]
    return [one for one, wanted in zip(operand_nodes(node), record(node).operands, strict=True) if wanted.owned]


def _is_owned(node: fx.Node) -> bool:
    return any(one is not None and one.owned for one in record(node).layouts)


def _is_same(a: object, b: object) -> bool:
    """True for one value, for casts of it, and for what is computed of the same in the same way."""
    a, b = _uncast(a), _uncast(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return a == b
    is_call = a.op == b.op == "call_function" and a.target is b.target and not facts_of(a.target).random
    return is_call and a.kwargs == b.kwargs and _is_same(a.args, b.args)


def _uncast(value: object) -> object:
    """What a cast, or a copy, is of."""
    while isinstance(value, fx.Node) and facts_of(value.target).moves == "same" and len(value.all_input_nodes) == 1:
        (value,) = value.all_input_nodes
    return value
