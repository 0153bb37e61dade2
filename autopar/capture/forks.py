"""Branches on data whose sides compute the same: `if torch.isnan(loss): log(...)`.

Where a model asks for the truth of a tensor that nobody knows, it is captured once for each way through its branches.
If all of them give one program, that is the program, whatever the data say; else the model is refused as ever.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace

import torch

from autopar.capture.captured import Captured
from autopar.capture.data.reads import AnyRows, Branches, Reads
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

    def take(self, line: Line | None, may_fork: bool) -> bool | None:
        """The side of the next branch; None if none may be taken. may_fork: it is one of two sides to be compared."""
        self.lines.append(line)
        if self.sides is None or not may_fork:
            return None
        if len(self.taken) >= _MOST:
            raise CaptureError("the model has too many branches on data.")
        position = len(self.taken)
        self.taken.append(self.sides[position] if position < len(self.sides) else False)
        return self.taken[-1]


Run = Callable[[Reads, Forks], Captured]


def captured(run: Run, asked: Reads) -> Captured:
    """What `run` gives: of rows that a mask selects by their number, if nothing else does; of branches whose sides are
    the same, one; of other branches on data the one that is most likely, which each step checks. asked: what may be
    read, and what a step found."""
    reads = asked.anew(counts=any(isinstance(value, (AnyRows, tuple)) for value in asked.given))
    if asked.given:
        return _guarded(run, reads)
    while True:
        forks = Forks()
        try:
            return run(reads, forks)
        except CaptureError:
            if reads.branches.zero:
                reads = reads.anew(branches=Branches(is_off=True), has_counted=False)
            elif not reads.selected <= reads.sized:  # what follows their rows in any number is at an end
                reads = reads.anew(sized=reads.sized | reads.selected)
            elif reads.has_counted:
                return _guarded(run, reads.anew(counts=True))
            elif not forks.lines:
                raise
            else:
                return (_of_all_sides(run, reads) if forks.lines else None) or _guarded(run, reads)


def _guarded(run: Run, asked: Reads) -> Captured:
    """The capture with the truth of data taken as it most likely is. A side that fails is not: the other one is taken.
    So is another fact than one that was taken for granted. Where all fail, what the likeliest fails of is said."""
    reads, failed = asked.anew(guards=True), list[CaptureError]()
    while True:
        try:
            return run(reads, Forks())
        except CaptureError as error:
            if reads.branches.zero:
                reads = reads.anew(branches=Branches(is_off=True), has_counted=False, given=asked.given)
                continue
            if not reads.selected <= reads.sized:
                reads = reads.anew(sized=reads.sized | reads.selected, given=asked.given)
                continue
            if reads.has_counted and not reads.counts:
                reads = reads.anew(counts=True, given=asked.given)
                continue
            guesses = [at for at, read in enumerate(reads.known) if read.has_other and at >= len(reads.given)]
            failed.append(error)
            if not guesses:
                raise failed[0] from failed[0].__cause__
            *before, last = (read.value for read in reads.known[: guesses[-1] + 1])
            reads = reads.anew(given=(*before, not last))


def _of_all_sides(run: Run, reads: Reads) -> Captured | None:
    """The capture that all ways through the branches give; None if one gives another, or fails."""
    first: Captured | None = None
    pending: list[tuple[bool, ...]] = [()]
    lines: dict[Line | None, None] = {}
    while pending:
        forks = Forks(pending.pop())
        try:
            with redirect_stdout(io.StringIO()):  # what a side prints, it would print of no data
                found = run(reads.anew(), forks)
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
