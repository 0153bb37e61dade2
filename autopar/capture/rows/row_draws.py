"""Dropout of rows that a mask selects: each row draws by its place in the mask.

So what a row draws hangs on no other row, and is the same wherever it is computed. The plain module that is compared
has the rows alone: it draws for all places of the mask, and takes those of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.rows.row_rules import Refused, Value
from autopar.capture.rows.selections import selecting
from autopar.ir.ops.ops import key_place, op
from autopar.passes.rules.splits import Split

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class RowDraw:
    """Dropout of selected rows. back: their mask is the one that selected rows as many selections before it, 1 for the
    last. dim: of the rows. count: of the places of the mask."""

    back: int
    dim: int
    count: int


@dataclass(slots=True)
class RowDraws:
    """The selections of a run that is captured, in their order, and the draws of their rows by number."""

    found: dict[int, RowDraw] = field(default_factory=dict)
    _selections: list[Tensor | None] = field(default_factory=list)

    def selected(self, valid: Tensor | None) -> None:
        """A call that selects rows; None where it takes no places."""
        self._selections.append(valid)

    def saw(self, nodes: Iterable[fx.Node], splits: Mapping[Value, Split], valid: Tensor) -> None:
        """Calls that take rows of which those count where `valid` is True. Raises Refused where nobody could tell the
        plain module what they draw."""
        for node in nodes:
            at = splits.get((node, 0)) if node.target is op("dropout") else None
            if at is None:
                continue
            back = next((i for i, one in enumerate(reversed(self._selections), 1) if one is valid), 0)
            if not back or at[1] != 1:
                raise Refused("it draws a number for each place")
            self.found[node.args[key_place(node.target)]] = RowDraw(back, at[0], valid.numel())  # type: ignore[index]


@dataclass(slots=True)
class PlainDraws:
    """What the plain module draws in a step. skips: random ops that it leaves out, by how many there were before. rows:
    dropout of rows that masks select, by number."""

    skips: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[int, RowDraw] = field(default_factory=dict)
    _selections: list[Tensor] = field(default_factory=list)  # the places of each
    _places: dict[int, Tensor] = field(default_factory=dict)  # of the rows of a draw, which may be made once more

    def saw(self, function: Any, args: Any, kwargs: Any) -> None:
        """A call, which may select rows."""
        mask = selecting(function, args, kwargs) if self.rows else None
        if mask is not None:
            self._selections.append(mask.reshape(-1).nonzero()[:, 0])

    def next(self, number: int, known: set[int]) -> int:
        """The number of a random op, behind those that are left out. known: takes the numbers of these."""
        while number - 1 in self.skips:
            left_out = range(number, number + self.skips[number - 1])
            known.update(left_out)
            number = left_out.stop
        return number

    def drawn(self, number: int, x: Tensor, draw: Callable[[Tensor], Any]) -> Any:
        """What a draw makes of a tensor. draw: the same of a tensor with all places of the mask."""
        mine = self.rows.get(number)
        if mine is None:
            return draw(x)
        places = self._places.setdefault(number, self._selections[-mine.back])
        shape = list(x.shape)
        shape[mine.dim] = mine.count
        every = x.new_zeros(shape).index_copy(mine.dim, places, x.clone())  # x may be written to
        return draw(every).index_select(mine.dim, places)
