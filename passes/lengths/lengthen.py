"""lengthen: a sequence that is joined inside of a model gets rows until the ranks of cp divide it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, Record, TensorType, erase_unused, is_getitem, operand_nodes, record
from autopar.passes.rules import call_of, table_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import Through, gives, resize, through
from autopar.passes.search.intents import context_axes

# How a call is computed on rows that were added to a sequence: along which name of its rule, and where zeros stay.


@dataclass(frozen=True, slots=True)
class LongerRows:
    """A value with more rows. dim: of the rows; is_zero: the rows added are zeros, else rows of the value again."""

    dim: int
    is_zero: bool


@dataclass(frozen=True, slots=True)
class Longer:
    """A call on longer operands.

    operands: of each the dim of its rows, None if it has none; results: likewise, with what the rows added hold.
    """

    operands: tuple[int | None, ...]
    results: tuple[LongerRows | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def by_rule(node: fx.Node, rows: Mapping[fx.Node, LongerRows], short: int, long: int, table: Table) -> Longer | None:
    """A call that takes the rows one by one, or sums over rows of which those added are certain to be zero. None for
    others."""
    operands = operand_nodes(node)
    known = {i: (rows[one].dim, 1) for i, one in enumerate(operands) if one in rows}
    found = through(call_of(node), known, table, short)
    if isinstance(found, str) or not _are_dims(found, short) or not gives(node, found, short, long):
        return None
    dims = [at and at[0] for at in found.operands]
    stays_zero = _stays_zero(found, [_is_zero(one, dim, rows) for one, dim in zip(operands, dims, strict=True)])
    if found.adds_up and not (stays_zero and found.rule.partial == "sum"):
        return None
    results = tuple(at and LongerRows(at[0], stays_zero) for at in found.results)
    return Longer(tuple(dims), results, *resize(found, short, long).arguments)


def _are_dims(through: Through, short: int) -> bool:
    """Whether the rows are a dim of each tensor that has them, and never a part of one."""
    types = (*through.call.operands, *through.call.results)
    places: tuple[Split | None, ...] = (*through.operands, *through.results)
    return all(at is None or type_.shape[at[0]] == short for type_, at in zip(types, places, strict=True))


def _stays_zero(through: Through, zero: list[bool]) -> bool:
    """Whether rows of zeros in some operands make zeros of the results."""
    return any(group and all(zero[i] for i in group) for group in through.linear)


def _is_zero(operand: fx.Node, dim: int | None, rows: Mapping[fx.Node, LongerRows]) -> bool:
    """Whether the rows added to an operand are zeros: what the backward pass made is filled up with them."""
    if dim is None:
        return False
    return rows[operand].is_zero if operand in rows else record(operand).is_backward


aten = torch.ops.aten
MADE_BY = "lengthen"


def lengthen(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. A class token before the patches makes an odd length: attention masks the rows added.

        mesh: cp=2
        CAPTURED program
        %token: f32[2,1,4] = batch "0"
        %x: f32[2,2,4] = batch "1"
        %cat: f32[2,3,4] = aten.cat.default([%token, %x], 1)
        %q: f32[2,1,3,4] = aten.unsqueeze.default(%cat, 1)
        %a: (f32[2,1,3,4], f32[2,1,3]) = autopar.attention.default(%q, %q, %q, None, False, 0.5)
        %out: f32[2,1,3,4] = operator.getitem(%a, 0)
        return value "y" = %out
    becomes
        CAPTURED program
        %token: f32[2,1,4] = batch "0"
        %x: f32[2,2,4] = batch "1"
        %cat: f32[2,3,4] = aten.cat.default([%token, %x], 1)
        %row: f32[2,1,4] = aten.slice.Tensor(%cat, 1, 2, 3)
        %longer: f32[2,4,4] = aten.cat.default([%cat, %row], 1)
        %q: f32[2,1,4,4] = aten.unsqueeze.default(%longer, 1)
        %place: i64[4] = aten.arange.default(4)
        %kept: b8[4] = aten.lt.Scalar(%place, 3)
        %columns: b8[1,1,4] = aten.reshape.default(%kept, [1, 1, 4])
        %a: (f32[2,1,4,4], f32[2,1,4]) = autopar.compared_attention.default(%q, %q, %q, [], [%columns], "c0", False, 0.5)
        %out: f32[2,1,4,4] = operator.getitem(%a, 0)
        %cut: f32[2,1,3,4] = aten.slice.Tensor(%out, 2, 0, 3)
        return value "y" = %cut

    The rows added are the last ones once more, so that they hold no number that the others do not. Ops that take the
    rows one by one (the table of rules says which) compute them, too; gradients of them are zero, which a sum over the
    rows must be certain of. Whatever else reads such a value is given it without them.
    """  # noqa: E501
    size = math.prod(size for _, size in context_axes(plan.mesh))
    if size == 1:
        return program
    size *= dict(plan.mesh.axes).get("tp", 1) if plan.sequence_parallel else 1  # which splits the pieces of cp further
    tried: set[str] = set()
    while True:
        root = next((node for node in program.calls() if node.name not in tried and _is_root(node, size)), None)
        if root is None:
            return program
        tried.add(root.name)
        program = _Lengthen(program, root, size, table_of(plan)).run()


def _is_root(node: fx.Node, size: int) -> bool:
    """True for a join of rows, not of samples, whose length is no multiple of `size`."""
    if node.target is not aten.cat.default or record(node).is_backward:
        return False
    shape, dim = record(node).type.shape, _dim(node)
    return dim > 0 and shape[dim] % size > 0 and shape[dim] > size


def _dim(node: fx.Node) -> int:
    """The dim along which a join joins."""
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % len(record(node).type.shape)


class _Lengthen:
    """Writes a program in which the rows of one join, and all that hangs on them, are more."""

    def __init__(self, program: Program, root: fx.Node, size: int, table: Table) -> None:
        self.program, self.root, self.dim, self.table = program, root, _dim(root), table
        self.short = record(root).type.shape[self.dim]
        self.longer = self.short + -self.short % size
        self.build = Builder(MADE_BY)
        # Of each tensor that has more rows; `build.value` is the longer one then.
        self.rows: dict[fx.Node, LongerRows] = {}
        self.items: dict[fx.Node, tuple[LongerRows | None, ...]] = {}  # of calls with several results
        # Cut or filled up along a dim, for the users of a phase.
        self.made: dict[tuple[fx.Node, int, str], fx.Node] = {}
        self.column: fx.Node | None = None

    def run(self) -> Program:
        """The program; as it was if no attention looks along the rows."""
        made = self.build.rewrite(self.program, self._put)
        if self.column is None:
            return self.program
        erase_unused(made.graph)
        return made

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node.op == "placeholder":
            return None
        if node is self.root:
            return self._joined(node)
        if is_getitem(node):
            return self._item(node)
        if node.op == "call_function" and any(one in self.rows for one in operand_nodes(node)):
            found = self._attention(node) or self._call(node)
            if found is not None:
                return found
        if node.target in (aten.select_backward.default, aten.slice_backward.default):
            return self._put_back(node)
        return self.build.copy(node, operand=lambda one: self._cut(one, record(node)))

    # --- calls

    def _joined(self, node: fx.Node) -> fx.Node:
        short = self.build.copy(node)
        self.made |= {(node, self.dim, phase): short for phase in ("forward", "backward")}
        self.rows[node] = LongerRows(self.dim, False)
        return self._again(short, self.dim, record(node))

    def _call(self, node: fx.Node) -> fx.Node | None:
        found = by_rule(node, self.rows, self.short, self.longer, self.table)
        if found is None:
            return None
        given = {
            one: self._given(one, place, record(node))
            for one, place in zip(operand_nodes(node), found.operands, strict=True)
        }
        args, kwargs = fx.node.map_arg((found.args, found.kwargs), given.__getitem__)
        return self._longer(node, node.target, args, found.results, **kwargs)

    def _attention(self, node: fx.Node) -> fx.Node | None:
        """Attention of longer queries to longer keys, of which those that were added are seen by none."""
        at = {op("attention"): 0, op("attention_backward"): 1}.get(node.target)  # type: ignore[call-overload]
        if at is None or not all(one in self.rows for one in node.args[at : at + 3]) or node.args[at + 3] is not None:
            return None
        causal, scale = node.args[-2:]
        if causal or any(self.rows[one].dim != 2 for one in node.args[at : at + 3]):  # type: ignore[index]
            return None
        if at and not self._is_zero(node.args[0]):  # type: ignore[arg-type]
            return None  # gradients of keys and values are sums over queries
        given = [self._given(one, 2, record(node)) for one in operand_nodes(node)]
        before, after, column = given[: at + 3], given[at + 3 :], self._column(record(node))
        args = (*before, [], [column], *after, "c0", False, scale)
        results = (LongerRows(2, True),) * 3 if at else (LongerRows(2, False),) * 2
        target = op("compared_attention_backward" if at else "compared_attention")
        return self._longer(node, target, args, results)

    def _put_back(self, node: fx.Node) -> fx.Node | None:
        """The gradient of a part of the rows, in zeros: in more of them, if other values of its shape have more."""
        grad, sizes, at, *place = _args(node)
        shape, dim = tuple(sizes), at % len(sizes)
        alike = (one for one, rows in self.rows.items() if rows.dim == dim and record(one).type.shape == shape)
        args: list[Any] = [self._cut(grad, record(node)), list(shape), dim, *place]
        if next(alike, None) is None:
            return self.build.copy(node, operand=lambda one: self._cut(one, record(node)))
        args[1][dim] = self.longer
        if len(place) == 1:
            args[3] = place[0] % self.short
        else:
            args[3:5] = slice(*place).indices(self.short)[:2]
        return self._longer(node, node.target, args, (LongerRows(dim, True),))

    def _longer(
        self, node: fx.Node, target: Any, args: Any, results: tuple[LongerRows | None, ...], **kwargs: Any
    ) -> fx.Node:
        like, places = record(node), iter(results)
        items = tuple(next(places) if type_ is not None else None for type_ in like.types)
        types = tuple(self._type(type_, rows) for type_, rows in zip(like.types, items, strict=True))
        like = like if types == like.types else like.with_(types=types, origin="")
        if like.several:
            self.items[node] = items
        elif items[0] is not None:
            self.rows[node] = items[0]
        return self.build.call(target, *args, like=like, name=node.name, **kwargs)

    def _item(self, node: fx.Node) -> fx.Node | None:
        producer, index = node.args
        rows = self.items[producer][index] if producer in self.items else None  # type: ignore[index]
        if rows is None:
            return None
        self.rows[node] = rows
        like = record(node).with_(types=(self._type(record(node).type, rows),), origin="")
        return self.build.call(node.target, self.build.value[producer], index, like=like, name=node.name)  # type: ignore[index, arg-type]

    def _type(self, type_: TensorType | None, rows: LongerRows | None) -> TensorType | None:
        if type_ is None or rows is None:
            return type_
        return TensorType((*type_.shape[: rows.dim], self.longer, *type_.shape[rows.dim + 1 :]), type_.dtype)

    # --- values of either length

    def _is_zero(self, node: fx.Node) -> bool:
        return self.rows[node].is_zero if node in self.rows else record(node).is_backward

    def _cut(self, node: fx.Node, user: Record) -> fx.Node:
        """A value without the rows that were added."""
        value = self.build.value[node]
        if node not in self.rows:
            return value
        key = node, self.rows[node].dim, _phase(node, user)
        if key not in self.made:
            like = record(node).with_(phase=key[2])
            self.made[key] = self.build.infer(aten.slice.Tensor, value, key[1], 0, self.short, like=like, name="cut")
        return self.made[key]

    def _given(self, node: fx.Node, dim: int | None, user: Record) -> fx.Node:
        """What a longer call reads: a value with as many rows, if it has any."""
        if dim is None or node in self.rows:
            return self.build.value[node]
        key = node, dim, _phase(node, user)
        if key not in self.made:
            like, value = record(node).with_(phase=key[2]), self.build.value[node]
            self.made[key] = self._zeros(value, dim, like) if self._is_zero(node) else self._again(value, dim, like)
        return self.made[key]

    def _again(self, value: fx.Node, dim: int, like: Record) -> fx.Node:
        """A value, and its last rows again."""
        first = 2 * self.short - self.longer
        row = self.build.infer(aten.slice.Tensor, value, dim, first, self.short, like=like, name="row")
        return self.build.infer(aten.cat.default, [value, row], dim, like=like, name="longer")

    def _zeros(self, value: fx.Node, dim: int, like: Record) -> fx.Node:
        """A value, and rows of zeros."""
        pads = [*[0] * 2 * (len(like.type.shape) - 1 - dim), 0, self.longer - self.short]
        return self.build.infer(aten.constant_pad_nd.default, value, pads, 0.0, like=like, name="longer")

    def _column(self, user: Record) -> fx.Node:
        """True for the keys that were there."""
        if self.column is None:
            place = self.build.infer(aten.arange.default, self.longer, like=user, name="place")
            kept = self.build.infer(aten.lt.Scalar, place, self.short, like=user, name="kept")
            self.column = self.build.infer(aten.reshape.default, kept, [1, 1, self.longer], like=user, name="columns")
        return self.column


def _args(node: fx.Node) -> Any:
    return node.args


def _phase(node: fx.Node, user: Record) -> str:
    """In which phase a value is cut or filled up for a user; what leaves the program is no user of a phase."""
    return "backward" if record(node).is_backward else user.phase
