"""How one call treats rows: where its tensors have them, and the call with another number of them.

Rows are a dim of a tensor, or what a dim has inside of some blocks (see `Split`). A call takes them one by one if the
table of rules may split them at any place; a call of which a result has none of them adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import NAMESPACE, SEMANTIC
from autopar.ir.program import TensorType, operand_nodes
from autopar.passes.rules import linalg
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Arguments, Call, Dims, Row, Rule, Table, call_of
from autopar.passes.rules.splits import Choice, Split, choice_at, place

# Their results depend on where a row stands.
_DRAWS = frozenset(f"{NAMESPACE}.{one.name}.default" for one in SEMANTIC if one.random and not one.placed)


@dataclass(frozen=True, slots=True)
class Through:
    """A call that takes rows one by one, or adds them up.

    choice: what the rows are among the names of its rule. operands, results: where each has them, None if it has none.
    """

    call: Call
    rule: Rule
    row: Row
    choice: Choice
    operands: tuple[Split | None, ...]
    results: tuple[Split | None, ...]

    @property
    def adds_up(self) -> bool:
        """True if a result has no rows though an operand has."""
        return None in self.results and any(self.operands)

    @property
    def terms(self) -> frozenset[int] | None:
        """The operands that decide about a sum: rows that are zero in all of these add nothing. None for what is no
        sum."""
        if self.rule.partial != "sum" or not any(self.operands):
            return None
        with_rows = frozenset(i for i, at in enumerate(self.operands) if at is not None)
        return next((group for group in self.linear if group <= with_rows), None)

    @property
    def linear(self) -> tuple[frozenset[int], ...]:
        """Sets of operands: rows that are zero in all of one are zero in the results."""
        is_sum = self.call.op.startswith("aten.sum.")  # which counts booleans, too
        return (frozenset({0}),) if is_sum else self.rule.linear


def through(
    call: Call, known: Mapping[int, Split], table: Table, count: int = 1, adds: bool = True, moves: bool = True
) -> Through | str:
    """Find how a call treats rows by where some of its tensors have them; or say what is in the way.

    known: where tensors (operands, then results, by position) have the rows. count: of the rows; a call may not take
    some of them apart from the others. adds: there may come to be rows that the model has not, which some ops refuse.
    moves: rows may come to stand elsewhere, where other numbers are drawn.
    """
    row = table.get(call.op)
    if row is None:
        return "no rule is known of it"
    if moves and call.op in _DRAWS:
        return "it draws a number for each place"
    if adds and call.op in linalg.ROWS:
        return "it may refuse a row that the model has not"
    rule = row.rule(call)
    sizes = dict(rule.sizes)
    tensors: tuple[Dims, ...] = (*rule.operands, *rule.results)
    choices = {choice_at(tensors[i], at, sizes) for i, at in known.items()}
    choice = choices.pop()
    if choices:
        return "its tensors have the rows at different places"
    if choice is None:
        return "it takes some of the rows apart"
    name, outer = choice
    if name in rule.replicated:
        return "it takes the rows together"
    if name in rule.ordered:
        return "it sees the order of the rows"
    if sizes[name] % (outer * count):
        return "it takes some of the rows apart"
    places = tuple(place(dims, choice, sizes) for dims in tensors)
    return Through(call, rule, row, choice, places[: len(rule.operands)], places[len(rule.operands) :])


@dataclass(frozen=True, slots=True)
class Resized:
    """The arguments of a call with another number of rows, and the types of its results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    types: tuple[TensorType, ...]

    @property
    def arguments(self) -> Arguments:
        """args and kwargs."""
        return self.args, self.kwargs


def resize(through: Through, short: int, long: int) -> Resized:
    """The call with `long` rows in the place of `short`."""
    sizes = dict(through.rule.sizes)
    sizes[through.choice[0]] = sizes[through.choice[0]] // short * long
    types = tuple(
        resized(type_, at, short, long) for type_, at in zip(through.call.results, through.results, strict=True)
    )
    return Resized(*local_call(through.call, through.row, through.rule, [type_.shape for type_ in types], sizes), types)


def resized(type_: TensorType, at: Split | None, short: int, long: int) -> TensorType:
    """A type with `long` rows in the place of `short`, if it has them."""
    if at is None:
        return type_
    dim = at[0]
    return TensorType((*type_.shape[:dim], type_.shape[dim] // short * long, *type_.shape[dim + 1 :]), type_.dtype)


def takes_each(node: fx.Node, known: Mapping[int, Split], table: Table) -> bool:
    """Whether a call takes rows one by one, in whatever order and however many there are; known: as of `through`."""
    found = through(call_of(node), known, table, adds=False)
    if isinstance(found, str) or not any(found.operands):
        return False
    rows = found.rule.sizes[found.choice[0]]
    return gives(node, found, rows, 2 * rows)


def gives(node: fx.Node, through: Through, short: int, long: int) -> bool:
    """Whether torch gives the types of `resize`: an argument that no rule knows may hold the number of rows."""
    wanted = resize(through, short, long)
    types = (resized(one, at, short, long) for one, at in zip(through.call.operands, through.operands, strict=True))
    empty = {
        operand: torch.empty(type_.shape, dtype=type_.dtype, device="meta")
        for operand, type_ in zip(operand_nodes(node), types, strict=True)
    }
    args, kwargs = fx.node.map_arg(wanted.arguments, empty.__getitem__)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    tensors = [one for one in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(one, torch.Tensor)]
    return [TensorType(tuple(one.shape), one.dtype) for one in tensors] == list(wanted.types)
