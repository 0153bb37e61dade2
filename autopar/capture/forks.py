"""Branches on data whose sides compute the same: `if torch.isnan(loss): log(...)`.

Where a model asks for the truth of a tensor that nobody knows, it is captured once for each way through its branches.
If all of them give one program, that is the program, whatever the data say; else the model is refused as ever.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from autopar.capture.captured import Captured
from autopar.capture.data.reads import Reads, Value
from autopar.capture.refusals.location import Line
from autopar.errors import CaptureError
from autopar.ir.text.text import print_program

_MOST = 3  # branches of a run, and so eight captures at most


@dataclass(slots=True)
class Forks:
    """The way of a run through its branches: `sides` as far as they are given, False from there on. None: no branch may
    be taken, only seen."""

    sides: tuple[bool, ...] | None = None
    taken: list[bool] = field(default_factory=list)
    lines: list[Line | None] = field(default_factory=list)

    def start(self) -> None:
        """A run begins."""
        self.taken.clear()

    def take(self, line: Line | None) -> bool | None:
        """The side of the next branch; None if none may be taken."""
        self.lines.append(line)
        if self.sides is None:
            return None
        if len(self.taken) >= _MOST:
            raise CaptureError("the model has too many branches on data.")
        position = len(self.taken)
        self.taken.append(self.sides[position] if position < len(self.sides) else False)
        return self.taken[-1]


Run = Callable[[Reads, Forks], Captured]


def captured(run: Run, specialize: bool, answers: tuple[Value, ...] | None) -> Captured:
    """What `run` gives: of rows that a mask selects by their number, if nothing else does; of branches whose sides are
    the same, one. answers: as of `Reads`."""
    sized: frozenset[Line | None] = frozenset()
    while True:
        reads, forks = Reads(sized, specialize, answers), Forks()
        try:
            return run(reads, forks)
        except CaptureError:
            if not reads.selected <= sized:
                sized |= reads.selected  # what follows their rows in any number is at an end
            elif not forks.lines:
                raise
            else:
                captured = _of_all_sides(run, partial(Reads, sized, specialize, answers))
                if captured is None:
                    raise
                return captured


def _of_all_sides(run: Run, reads: Callable[[], Reads]) -> Captured | None:
    """The capture that all ways through the branches give; None if one gives another, or fails."""
    first: Captured | None = None
    pending: list[tuple[bool, ...]] = [()]
    lines: dict[Line | None, None] = {}
    while pending:
        forks = Forks(pending.pop())
        try:
            with redirect_stdout(io.StringIO()):  # what a side prints, it would print of no data
                found = run(reads(), forks)
        except CaptureError:
            return None
        if first is not None and not _is_same(first, found):
            return None
        first = first or found
        given = len(forks.sides or ())
        pending += [(*forks.taken[:at], True) for at in range(given, len(forks.taken))]
        lines.update(dict.fromkeys(forks.lines))
    assert first is not None
    notes = tuple(
        f"{_place(line)} is a branch on data whose sides compute the same: no step takes it" for line in lines
    )
    return replace(first, program=first.program.with_(notes=(*first.program.notes, *notes)))


def _is_same(one: Captured, other: Captured) -> bool:
    pairs = zip(one.constants.items(), other.constants.items(), strict=False)
    return (
        print_program(one.program) == print_program(other.program)
        and len(one.constants) == len(other.constants)
        and all(a == b and _is_equal(x, y) for (a, x), (b, y) in pairs)
        and one.result_form == other.result_form
        and repr(one.result_leaves) == repr(other.result_leaves)
        and one.reads == other.reads
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return one.dtype == other.dtype and one.device.type != "meta" and torch.equal(one, other)


def _place(line: Line | None) -> str:
    return f"{line[0]}:{line[1]}" if line else "an unknown line"
