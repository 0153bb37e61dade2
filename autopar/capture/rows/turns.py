"""Loops through the places of a mask, `for e in hit.nonzero()`, branches by how many rows one selects, `if counts[e] ==
0: continue`, and the masks of a run in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import fx

from autopar.capture.data.reads import Branches
from autopar.capture.refusals.location import Line, Locator
from autopar.capture.rows.implied import count_asked, is_implied
from autopar.capture.rows.row_sides import RowSides
from autopar.capture.trace.tracer import Tracer
from autopar.ir.ops.op_facts import QUERIES
from autopar.torch_compat import no_function_modes, storage_of

Tensor = torch.Tensor
_LOOPS = (Tensor.unbind, torch.unbind, Tensor.__iter__, Tensor.tolist)
_EQUAL = (torch.eq, Tensor.eq, Tensor.__eq__)


@dataclass(frozen=True, slots=True)
class RowTurn:
    """One of a loop through the places of a mask: whether the mask is True there, and what the loop is given."""

    mask: Tensor
    place: int
    holds: Tensor
    value: Any


@dataclass(slots=True)
class MaskOrder:
    """The masks of one run. lines: of each. counts: of the rows of each, in a run that is to know them. sides: of a run
    in which some have no rows. turn: of the loop that goes on, in which masks are no more than parts of its own.
    is_turned: there was one, or a branch. asked: the mask that the last branch stands for, by its number, with the node
    and the place that say how many rows it has.

    places: of masks of one dim, by the id of their places, these and the mask."""

    locator: Locator | None = None
    branches: Branches = field(default_factory=Branches)
    tracer: Tracer | None = None
    lines: list[Line | None] = field(default_factory=list)
    counts: list[Tensor] | None = None
    sides: RowSides | None = None
    turn: RowTurn | None = None
    is_turned: bool = False
    asked: tuple[int, tuple[fx.Node, int | None] | None] | None = None
    places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_forward(self) -> bool:
        return self.locator is None or self.locator.phase == "forward"

    def begin(self, valid: Tensor, line: Line | None, condition: Tensor | None = None) -> tuple[int, bool]:
        """The number of a mask, and whether it has rows in this run. condition: what the model gave as a mask."""
        if self.asked is not None and condition is not None and self._is_asked(condition, line):
            return self.asked[0], True
        if self.turn is None and self.is_forward:  # what is computed again has its number
            self.lines.append(line)
            if self.counts is not None:
                self.counts.append(valid.sum())
            if self.sides is not None:
                return self.sides.begin()
        return len(self.lines) - 1, True

    def asks(self, truth: Tensor, line: Line | None) -> bool | None:
        """What a branch is told that asks for a number of rows whether it is zero; None for another one. It begins the
        mask of these rows."""
        node = None if self.tracer is None else self.tracer.node_of(truth)
        found = None if node is None else count_asked(node)
        if found is not None:
            self.branches.zero[line] = found[2]
        elif self.tracer is not None or line not in self.branches.zero:
            return None
        is_zero, self.is_turned = self.branches.zero[line], True
        with no_function_modes():  # no call of the model's
            holds = (truth == 0 if is_zero else truth != 0).reshape(1)
            number, has_rows = self.begin(holds, line)
        self.asked = number, None if found is None else found[:2]
        return has_rows != is_zero

    def _is_asked(self, condition: Tensor, line: Line | None) -> bool:
        """True for a mask that has no rows where the last branch says so."""
        if self.tracer is None:
            return line in self.branches.masks
        node = self.tracer.node_of(condition)
        asked = self.asked[1] if self.asked is not None else None
        if node is None or asked is None or not is_implied(*asked, node):
            return False
        self.branches.masks.add(line)
        return True

    def selected(self, number: int, places: Sequence[Tensor], mask: Tensor) -> None:
        """The places that a mask selects, a tensor for each dim."""
        if len(places) == 1:
            self._enter(places[0], mask)
        if self.sides is not None:
            self.sides.selected(number, (*places, mask))  # by either of which rows are put back

    def gave(self, places: Sequence[Tensor], made: Tensor) -> None:
        """The places of a mask as a row for each."""
        if len(places) == 1:
            self.shown(places, made)
        if self.sides is not None:
            self.sides.shown(places, made)

    def narrowed(self, valid: Tensor, condition: Tensor) -> Tensor:
        """Which rows count in a turn: none where its mask is False, unless there is none anyhow."""
        if self.turn is None:
            return valid
        if self.tracer is not None:
            mask, node = self.tracer.node_of(self.turn.mask), self.tracer.node_of(condition)
            if mask is not None and node is not None and is_implied(mask, self.turn.place, node):
                return valid
        return valid & self.turn.holds

    def with_number(self, function: Any, args: Any) -> Any:
        """The arguments of a call, of `x == e` with the number of a turn in place of the tensor of it that it has."""
        value = self.turn.value if self.turn is not None and function in _EQUAL else None
        if not isinstance(value, Tensor) or value.ndim or value._version:
            return args
        return tuple(self.turn.place if one is value else one for one in args)  # type: ignore[union-attr]

    def turns(self, mask: Tensor, of: Callable[[int], Any]) -> Iterator[Any]:
        """Go through all places of a mask. What is made of rows meanwhile is padding where the mask is False."""
        self.is_turned = True
        try:
            for place in range(len(mask)):
                self.turn = None
                with no_function_modes():  # no call of the model's
                    holds = mask[place] != 0
                    has_rows = self.begin(holds, None)[1]
                if has_rows:
                    value = of(place)
                    self.turn = RowTurn(mask, place, holds, value)
                    yield value
        finally:
            self.turn = None

    def mask_of(self, function: Any, args: Any) -> Tensor | None:
        """The mask whose places Python goes through; None for another call."""
        if function not in _LOOPS or args[1:] not in ((), (0,)):
            return None
        mine = self.places.get(id(args[0]))
        return mine[1] if mine is not None and mine[0] is args[0] else None

    def taken(self, function: Any, args: Any) -> Tensor | None:
        """What stands at the place of a turn, as an index of one place gives it; None for another call."""
        if self.turn is None or function is not Tensor.__getitem__ or args[1] is not self.turn.value:
            return None
        is_row = isinstance(args[1], Tensor) and args[1].ndim > 0
        return args[0][self.turn.place].unsqueeze(0).clone() if is_row else None

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any, written: list[Tensor]) -> None:
        """A call with what it returned, and what it wrote into."""
        self.shown(args, result)
        if self.sides is not None and function not in QUERIES:
            self.sides.saw(function, args, kwargs, result, written)

    def shown(self, args: Any, result: Any) -> None:
        """Note what a view of the places of a mask shows: the same places."""
        mine = self.places.get(id(args[0])) if self.places and args else None
        if mine is None or mine[0] is not args[0] or not isinstance(result, Tensor):
            return
        if storage_of(result) == storage_of(mine[0]) and result.numel() == mine[0].numel() == len(result):
            self._enter(result, mine[1])

    def _enter(self, places: Tensor, mask: Tensor) -> None:
        """Note the places of a mask, whose list is asked for as that of any tensor: the one of a tensor without data
        has a tolist() that goes through all of them at once."""
        self.places[id(places)] = places, mask
        own = ref(places)
        places.tolist = lambda: Tensor.tolist(own())  # type: ignore[method-assign, assignment, arg-type, return-value]
