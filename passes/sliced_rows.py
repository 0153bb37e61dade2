"""What hangs on a slice of rows: which values have its length, and whether they may have the length of the whole.

`unslice` asks it whether anybody would see the rows that the slice drops, and what these hold if they are not dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops import op, semantic_of
from autopar.ir.program import TensorType, operand_nodes, record
from autopar.passes.rules import call_of, linalg, local_call, rule_of
from autopar.passes.rules.rule import Call, Dims, Row, Rule, Table
from autopar.passes.rules.splits import Split, choice_at, place
from autopar.passes.search.items import source_of

aten = torch.ops.aten

Value = tuple[fx.Node, int]  # a call or placeholder, and which of its tensor results
NARROW = 16  # a value of so many times fewer elements than what is sliced may be cut, or padded, all the same
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_VIEWS = frozenset(
    f"aten.{name}" for name in ("view.default", "_unsafe_view.default", "view_copy.default", "reshape.default",
                                "permute.default", "transpose.int", "t.default", "unsqueeze.default",
                                "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default")
)  # fmt: skip
_ALIKE = {aten.zeros.default: 0, aten.ones.default: 1}


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that a slice keeps: `short` of `long`, from `start` on."""

    start: int
    short: int
    long: int

    @property
    def is_most(self) -> bool:
        """True if little work is done for rows that nobody sees."""
        dropped = self.long - self.short
        return 0 < dropped < self.short and dropped <= max(1, self.long // 4)


@dataclass(frozen=True, slots=True)
class Lifted:
    """A call that takes the rows one by one, or sums over them: how it may be split, and along which name."""

    call: Call
    rule: Rule
    row: Row
    name: str

    @property
    def sums(self) -> bool:
        """True if it sums over the rows."""
        return any(self.name not in _names(dims) for dims in self.rule.results)

    def terms(self) -> frozenset[int] | None:
        """The operands that decide about a sum: rows that are zero in all of these add nothing. None for no sum."""
        with_rows = {i for i, dims in enumerate(self.rule.operands) if self.name in _names(dims)}
        groups = [group for group in self.rule.linear if group <= with_rows]
        if self.rule.partial != "sum" or not with_rows:
            return None
        if self.call.op in map(str, _SUMS):  # also of booleans
            return frozenset({0})
        return groups[0] if groups else None


class SlicedRows:
    """The values that have the length of one slice, each with the place of its rows, and the calls between them."""

    def __init__(self, slice_: fx.Node, dim: int, window: Window, table: Table, alone: set[fx.Node]) -> None:
        """alone: what is computed without parameters, and may be computed twice."""
        self.slice, self.window, self.table, self.alone = slice_, window, table, alone
        self.places: dict[Value, Split] = {}
        self.calls: dict[fx.Node, Lifted] = {}
        self.rest: dict[Value, Any] = {}  # the number in all dropped rows, where it is known
        self._closed: set[fx.Node] = set()  # calls that see how many rows there are
        self._conflict = False
        self._pending: dict[fx.Node, None] = {}
        self._locate((slice_, 0), (dim, 1))

    def is_unseen(self) -> bool:
        """True if all that hangs on the slice may have its whole length."""
        while self._pending and not self._conflict:
            node = next(iter(self._pending))
            del self._pending[node]
            self._visit(node)
        if self._conflict or not self.calls:
            return False
        if not all(map(self._lifted, self.calls)):  # something was found out about an operand afterwards
            return False
        self._find_rests()
        return all(map(self._may_be_long, self.places)) and all(map(self._is_possible, self.calls))

    # --- where the rows are

    def _locate(self, value: Value, at: Split) -> None:
        """Note where a value has the rows; its producer and its users are to be looked at."""
        known = self.places.setdefault(value, at)
        self._conflict |= known != at
        if known is not at:
            return
        self._pending[value[0]] = None
        is_alone = value[0] in self.alone
        for user in readers(value):
            if user.op == "call_function" and (not is_alone or user in self.alone):
                self._pending[user] = None

    def is_whole(self, node: fx.Node) -> bool:
        """True for a slice of these rows: the whole stands for it."""
        found = window_of(node)
        return found is not None and found[1] == self.window and self.places.get((node, 0)) == (found[0], 1) and (
            node not in self.alone
        )  # fmt: skip

    def is_end(self, node: fx.Node) -> bool:
        """True for what puts the rows back into the whole: the slice's gradient, or a pad."""
        found = pad_of(node)
        return found is not None and found[1] == self.window and self.at(operand_nodes(node)[0]) == (found[0], 1)

    def at(self, node: fx.Node) -> Split | None:
        """Where a tensor has the rows; None if it has none."""
        return self.places.get(source_of(node))

    def _visit(self, node: fx.Node) -> None:
        if node.op != "call_function" or node in self._closed or self.is_whole(node) or self.is_end(node):
            return
        found = self._lifted(node)
        if found is None:
            self._closed.add(node)
            self.calls.pop(node, None)
            return
        self.calls[node] = found[0]
        for value, at in found[1]:
            self._locate(value, at)

    def _lifted(self, node: fx.Node) -> tuple[Lifted, list[tuple[Value, Split]]] | None:
        """How a call treats the rows, and where its operands and results have them. None if it does not take them one
        by one."""
        call = call_of(node)
        pair = rule_of(call, self.table)
        semantic = semantic_of(node.target)
        if pair is None or (semantic is not None and semantic.random) or call.op in linalg.ROWS:
            return None  # a decomposition may refuse a row of zeros
        rule, sizes = pair[0], dict(pair[0].sizes)
        tensors = list(_tensors(node, rule))
        choices = {choice_at(dims, self.places[value], sizes) for value, dims in tensors if value in self.places}
        choice = choices.pop()
        if choices or choice is None or sizes[choice[0]] % (choice[1] * self.window.short):
            return None
        if choice[0] in rule.replicated | rule.ordered:
            return None
        lifted = Lifted(call, rule, pair[1], choice[0])
        if lifted.sums and any(choice[0] in _names(dims) for dims in rule.operands) and lifted.terms() is None:
            return None
        return lifted, [(value, at) for value, dims in tensors if (at := place(dims, choice, sizes)) is not None]

    # --- what the dropped rows hold

    def _find_rests(self) -> None:
        for node in self.slice.graph.nodes:
            for value in [value for value in self.places if value[0] is node]:
                rest = self._rest(node) if node in self.calls else self._fill(value)
                if rest is not None:
                    self.rest[value] = rest

    def _fill(self, value: Value) -> Any:
        """What a value is padded with: labels with what every check of theirs ignores."""
        if self.is_whole(value[0]):
            return None
        type_ = type_of(value)
        if type_.dtype.is_floating_point or type_.dtype is torch.bool:
            return type_.dtype.is_floating_point and 0.0
        ignored = {user.args[2] for user in self._checks(value)}
        return ignored.pop() if len(ignored) == 1 and None not in ignored else 0

    def _checks(self, value: Value) -> list[fx.Node]:
        """The checks of an index that a value is, as it is or after a view."""
        found, pending = [], [value]
        while pending:
            for user in readers(pending.pop()):
                if user.target is op("checked_index"):
                    found.append(user)
                elif user in self.calls and str(user.target) in _VIEWS:
                    pending.append((user, 0))
        return found

    def _rest(self, node: fx.Node) -> Any:
        """The number in the dropped rows of a call's result; None where it is not known."""
        operands = operand_nodes(node)
        if node.target is aten.full.default:
            return node.args[1]
        if node.target in _ALIKE:
            return _ALIKE[node.target]
        known = [self.number(operand) for operand in operands]
        if str(node.target) in _VIEWS or node.target is op("checked_index"):
            return known[0]
        if node.target is aten.where.self and known[0] is not None:
            return known[1] if known[0] else known[2]
        if node.target in _SUMS:
            return known[0] if known[0] == 0 else None
        if not self.calls[node].row.pointwise or None in known or record(node).several or not known:
            return None
        numbers = {o: torch.tensor(n, dtype=record(o).type.dtype) for o, n in zip(operands, known, strict=True)}
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        return node.target(*args, **kwargs).item()  # type: ignore[operator]

    def number(self, node: fx.Node) -> Any:
        """The number that a tensor holds in all dropped rows; None where it is not known."""
        value = source_of(node)
        if value in self.places:
            return self.rest.get(value)
        return node.args[1] if node.target is aten.full.default else None

    def must_be_zero(self, node: fx.Node) -> list[int]:
        """The operands of a sum whose dropped rows must be set to zero: its terms, and what could be infinite."""
        lifted = self.calls[node]
        terms = lifted.terms() if lifted.sums else None
        if terms is None:
            return []
        found = [(i, self.number(operand)) for i, operand in enumerate(operand_nodes(node)) if self.at(operand)]
        return [i for i, number in found if number is None or not math.isfinite(number) or (i in terms and number != 0)]

    # --- may they all be long?

    def is_short_too(self, value: Value) -> bool:
        """True if somebody reads a value at the length of the slice."""
        return any(user not in self.calls and not self.is_end(user) for user in readers(value))

    def _may_be_long(self, value: Value) -> bool:
        """True if a value may be padded, or cut again, where that is wanted."""
        node = value[0]
        is_cheap = node in self.alone or type_of(value).numel * NARROW <= record(self.slice).type.numel
        if self.is_whole(node):
            return not self.is_short_too(value)
        return is_cheap or (node in self.calls and not self.is_short_too(value))

    def _is_possible(self, node: fx.Node) -> bool:
        """True if a call has no index that a dropped row could lack, and gives at the whole length what it should."""
        lifted = self.calls[node]
        if node.target is op("checked_index"):
            index, size, ignored = node.args
            number = self.number(index)  # type: ignore[arg-type]
            return number is not None and (number == ignored or 0 <= number < size)  # type: ignore[operator]
        is_lookup = not lifted.row.pointwise and str(node.target) not in _VIEWS and node.target not in _SUMS
        checked = semantic_of(node.target) is not None
        for i, operand in enumerate(operand_nodes(node)):
            is_index = not record(operand).type.dtype.is_floating_point and self.at(operand) is not None
            is_zeroed = i in self.must_be_zero(node)
            if is_lookup and is_index and not checked and not is_zeroed and self.number(operand) != 0:
                return False
        return self._gives_types(node)

    def _gives_types(self, node: fx.Node) -> bool:
        """Whether torch gives these types too: an argument may hold the length of the slice."""
        args, kwargs = fx.node.map_arg(self.arguments(node), self._empty)
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        found = [TensorType(tuple(one.shape), one.dtype) for one in results if isinstance(one, torch.Tensor)]
        return found == [type_ for type_ in self.types(node) if type_ is not None]

    def _empty(self, node: fx.Node) -> Any:
        type_ = self.type_of(node)
        return torch.empty(type_.shape, dtype=type_.dtype, device="meta")

    # --- how they are long

    def type_of(self, node: fx.Node) -> TensorType:
        """The type of a tensor at the whole length, if it has the rows."""
        return self._longer(record(node).type, self.at(node))

    def types(self, node: fx.Node) -> tuple[TensorType | None, ...]:
        """Those of a call's results."""
        found = iter(range(len(record(node).types)))
        return tuple(
            None if type_ is None else self._longer(type_, self.places.get((node, next(found))))
            for type_ in record(node).types
        )

    def _longer(self, type_: TensorType, at: Split | None) -> TensorType:
        if at is None:
            return type_
        shape = list(type_.shape)
        shape[at[0]] = shape[at[0]] // self.window.short * self.window.long
        return TensorType(tuple(shape), type_.dtype)

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of a call at the whole length."""
        lifted = self.calls[node]
        sizes = dict(lifted.rule.sizes)
        sizes[lifted.name] = sizes[lifted.name] // self.window.short * self.window.long
        shapes = [type_.shape for type_ in self.types(node) if type_ is not None]
        return local_call(lifted.call, lifted.row, lifted.rule, shapes, sizes)


def window_of(node: fx.Node) -> tuple[int, Window] | None:
    """The dim of a slice, and the rows that it keeps; None for other ops."""
    if node.target is not aten.slice.Tensor:
        return None
    x, dim, start, end, step = _filled(node, 0, None, None, 1)
    shape = record(x).type.shape
    return _window(shape, dim, start, end, step)


def pad_of(node: fx.Node) -> tuple[int, Window] | None:
    """The dim along which an op puts rows into a longer one, and which rows those become; None for other ops."""
    if node.target is aten.slice_backward.default:
        _, shape, dim, start, end, step = node.args
        return _window(tuple(shape), dim, start, end, step)  # type: ignore[arg-type]
    if node.target is not aten.constant_pad_nd.default:
        return None
    pads: Any = node.args[1]
    shape = record(operand_nodes(node)[0]).type.shape
    padded = [i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if len(padded) != 1 or min(pads) < 0:
        return None
    dim, (before, after) = len(shape) - 1 - padded[0], pads[2 * padded[0] : 2 * padded[0] + 2]
    return dim, Window(before, shape[dim], before + shape[dim] + after)


def _window(shape: tuple[int, ...], dim: Any, start: Any, end: Any, step: Any) -> tuple[int, Window] | None:
    dim %= len(shape)
    first, last, _ = slice(start, end).indices(shape[dim])
    return (dim, Window(first, last - first, shape[dim])) if step == 1 else None


def _filled(node: fx.Node, *defaults: Any) -> tuple[Any, ...]:
    """The arguments of a call, with defaults for those after the first that it leaves out."""
    return (*node.args, *defaults[len(node.args) - 1 :])


def readers(value: Value) -> list[fx.Node]:
    """The nodes that read a value, by its node or by what picks it out of several results."""
    node = value[0]
    if not record(node).several:
        return list(node.users)
    return [reader for user in node.users if source_of(user) == value for reader in user.users]


def type_of(value: Value) -> TensorType:
    """The type of a value."""
    return [type_ for type_ in record(value[0]).types if type_ is not None][value[1]]


def _tensors(node: fx.Node, rule: Rule) -> Iterator[tuple[Value, Dims]]:
    """The operands and results of a call, with their names."""
    yield from zip(map(source_of, operand_nodes(node)), rule.operands, strict=True)
    yield from (((node, i), dims) for i, dims in enumerate(rule.results))


@functools.cache
def _names(dims: Dims) -> frozenset[str]:
    return frozenset(name for dim in dims for name in dim)
