"""What hangs on a slice of rows: which values have its length, and whether they may have the length of the whole.

`unslice` asks it whether anybody would see the rows that the slice drops, and what these hold if they are not dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, fill_of, is_check
from autopar.ir.ops.ops import op, op_name, semantic_of
from autopar.ir.program import Program, TensorType, operand_nodes, record, source_of
from autopar.passes.rules import call_of
from autopar.passes.rules.follow import Followed, Value, follow, readers, type_of
from autopar.passes.rules.rule import Arguments, Table
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import Through, gives, resize, resized, through

aten = torch.ops.aten

NARROW = 16  # a value of so many times fewer elements than what is sliced may be cut, or padded, all the same
_VIEWS = ("flat", "turned", "repeated")  # of the elements that were there


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

    def is_at_stake(self, size: int, lengths: Collection[int]) -> bool:
        """True for most of the rows of a sequence of one of some lengths, which an axis of `size` divides."""
        return self.is_most and self.long % size == 0 and self.long in lengths


class SlicedRows:
    """The values that have the length of one slice, each with the place of its rows, and the calls between them."""

    def __init__(self, slice_: fx.Node, dim: int, window: Window, table: Table, alone: set[fx.Node]) -> None:
        """alone: what is computed without parameters, and may be computed twice."""
        self.slice, self.window, self.table, self.alone = slice_, window, table, alone
        self.rest: dict[Value, Any] = {}  # the number in all dropped rows, where it is known
        self.found = follow({(slice_, 0): (dim, 1)}, self._through, self._readers, is_end=self._is_edge)
        self.places, self.calls = self.found.places, self.found.calls

    def is_unseen(self) -> bool:
        """True if all that hangs on the slice may have its whole length."""
        if self.found.torn or not self.calls:
            return False
        self._find_rests()
        return all(map(self._may_be_long, self.places)) and all(map(self._is_possible, self.calls))

    def why_not(self) -> str:
        """What is in the way of the whole length, of the first value that lacks it."""
        if self.found.torn:
            return "a value has them at two places"
        for value in self.places:
            if not self._may_be_long(value):
                user = next((one for one in readers(value) if one not in self.calls and not self.is_end(one)), None)
                if user is not None and user in self.found.closed:
                    return f"{op_name(user.target)} at {record(user).source}: {self.found.closed[user]}"
        return "what is made of them has their number, or looks up what the whole may not hold"

    # --- where the rows are

    def _through(self, node: fx.Node, known: Mapping[int, Split]) -> Through | str:
        """How a call treats the rows: one by one, or in a sum to which rows of zeros add nothing."""
        found = through(call_of(node), known, self.table, self.window.short)
        if isinstance(found, Through) and found.adds_up and found.terms is None:
            return "it adds the rows up, and zeros count"
        return found

    def _readers(self, value: Value) -> list[fx.Node]:
        """The calls that read a value: of what hangs on no parameter those that hang on none, too."""
        return [one for one in readers(value) if value[0] not in self.alone or one in self.alone]

    def _is_edge(self, node: fx.Node, followed: Followed) -> bool:
        return self._is_whole(node, followed) or self._is_end(node, followed)

    def _is_whole(self, node: fx.Node, followed: Followed) -> bool:
        kept = window_of(node)
        return (
            kept is not None
            and kept[1] == self.window
            and followed.places.get((node, 0)) == (kept[0], 1)
            and node not in self.alone
        )

    def _is_end(self, node: fx.Node, followed: Followed) -> bool:
        padded = pad_of(node)
        return padded is not None and padded[1] == self.window and followed.at(operand_nodes(node)[0]) == (padded[0], 1)

    def is_whole(self, node: fx.Node) -> bool:
        """True for a slice of these rows: the whole stands for it."""
        return self._is_whole(node, self.found)

    def is_end(self, node: fx.Node) -> bool:
        """True for what puts the rows back into the whole: the slice's gradient, or a pad."""
        return self._is_end(node, self.found)

    def at(self, node: fx.Node) -> Split | None:
        """Where a tensor has the rows; None if it has none."""
        return self.found.at(node)

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
        checks, pending = [], [value]
        while pending:
            for user in readers(pending.pop()):
                if user.target is op("checked_index"):
                    checks.append(user)
                elif user in self.calls and facts_of(user.target).moves in _VIEWS:
                    pending.append((user, 0))
        return checks

    def _rest(self, node: fx.Node) -> Any:
        """The number in the dropped rows of a call's result; None where it is not known."""
        operands, facts, is_sum = operand_nodes(node), facts_of(node.target), op_name(node.target) == "sum"
        known = [self.number(operand) for operand in operands]
        if facts.moves in _VIEWS or is_check(node.target):
            return known[0]
        if node.target is aten.where.self and known[0] is not None:
            return known[1] if known[0] else known[2]
        if is_sum:
            return known[0] if known[0] == 0 else None
        if not facts.pointwise or None in known or record(node).several or not known:
            return None
        numbers = {
            o: torch.tensor(n, dtype=record(o).type.dtype, device="cpu") for o, n in zip(operands, known, strict=True)
        }
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        return node.target(*args, **kwargs).item()  # type: ignore[operator]

    def number(self, node: fx.Node) -> Any:
        """The number that a tensor holds in all dropped rows; None where it is not known."""
        value = source_of(node)
        if value in self.places:
            return self.rest.get(value)
        return fill_of(node)

    def must_be_zero(self, node: fx.Node) -> list[int]:
        """The operands of a sum whose dropped rows must be set to zero: its terms, and what could be infinite."""
        call = self.calls[node]
        terms = call.terms if call.adds_up else None
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
        if node.target is op("checked_index"):
            index, size, ignored, least = (*node.args, 0)[:4]
            number = self.number(index)  # type: ignore[arg-type]
            return number is not None and (number == ignored or least <= number < size)  # type: ignore[operator]
        if is_check(node.target):
            number = self.number(node.args[0])  # type: ignore[arg-type]
            return number is not None and node.args[1] <= number <= node.args[2]  # type: ignore[operator]
        facts = facts_of(node.target)
        is_lookup = not facts.pointwise and facts.moves not in _VIEWS and op_name(node.target) != "sum"
        checked = semantic_of(node.target) is not None
        for i, operand in enumerate(operand_nodes(node)):
            is_index = not record(operand).type.dtype.is_floating_point and self.at(operand) is not None
            is_zeroed = i in self.must_be_zero(node)
            if is_lookup and is_index and not checked and not is_zeroed and self.number(operand) != 0:
                return False
        return gives(node, self.calls[node], self.window.short, self.window.long)

    # --- how they are long

    def type_of(self, node: fx.Node) -> TensorType:
        """The type of a tensor at the whole length, if it has the rows."""
        return self._longer(record(node).type, self.at(node))

    def types(self, node: fx.Node) -> tuple[TensorType | None, ...]:
        """The types of a call's results."""
        found = iter(range(len(record(node).types)))
        return tuple(
            None if type_ is None else self._longer(type_, self.places.get((node, next(found))))
            for type_ in record(node).types
        )

    def _longer(self, type_: TensorType, at: Split | None) -> TensorType:
        return resized(type_, at, self.window.short, self.window.long)

    def arguments(self, node: fx.Node) -> Arguments:
        """The arguments of a call at the whole length."""
        return resize(self.calls[node], self.window.short, self.window.long).arguments


def alone_in(program: Program) -> set[fx.Node]:
    """The nodes that hang on no parameter: to compute them twice costs little."""
    fed = {node for node, _ in program.parameters()}
    for node in program.calls():
        if any(operand in fed for operand in node.all_input_nodes):
            fed.add(node)
    return {node for node in program.graph.nodes if node not in fed}


def lengths_in(program: Program, alone: set[fx.Node]) -> set[int]:
    """The sizes of the batch's dims but the first, and of what is computed of it alone."""
    fed = {node for node, entry in program.entries if entry.kind == "batch"}
    for node in program.calls():
        if node in alone and any(operand in fed for operand in node.all_input_nodes):
            fed.add(node)
    return {size for node in fed for type_ in record(node).types if type_ for size in type_.shape[1:]}


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
