"""When copies start and are awaited, by places: of a graph's nodes, or of the steps by which the planner knows it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

BEHIND = 1  # layers of the forward pass that a copy out may take
AHEAD = 2  # layers that a copy back starts before its use at most, if it starts as late as hides it
BESIDE = 3  # turns between the passes: one in which a value goes, one in which it comes back, and one without it


class Going(NamedTuple):
    """A value that goes out. made: its place. latest: where its copy has ended, however slow the link. read: the place
    behind the forward pass's last use. us: of its copy."""

    made: int
    latest: int
    read: int
    us: float


class Coming(NamedTuple):
    """A value that comes back. use: the place that reads it first. earliest: where its copy may start. us: of it."""

    use: int
    earliest: int
    us: float


def ends_out(values: Sequence[Going], clock: Sequence[float], end: int) -> list[int]:
    """Where copies out are awaited: when they are done, at most a layer later, and behind the forward pass's last use.
    values: in the order in which they are made. clock: us of all before each place; empty if nobody asks how long they
    take. end: of the forward pass."""
    ends, free = list[int](), 0.0
    for one in values:
        place = one.latest
        if clock:
            free = max(free, clock[one.made + 1]) + one.us
            place = min(place, bisect_left(clock, free, one.made + 1, end))
        ends.append(min(end, max(place, one.read)))
    return ends


def starts_back(values: Sequence[Coming], clock: Sequence[float]) -> list[int]:
    """Where copies back start: at the earliest place, or, with a clock, as late as hides them."""
    starts = [min(one.use, one.earliest) for one in values]
    free = clock[-1] if clock else 0.0
    for i in sorted(range(len(values)), key=lambda i: -values[i].use) if clock else ():
        free = min(free, clock[values[i].use]) - values[i].us
        while starts[i] < values[i].use and clock[starts[i] + 1] <= free:
            starts[i] += 1
    return starts


def goes_beside(between: int) -> bool:
    """True if what the layers of a stage do not hide goes and comes beside the turns of other micro-batches. between:
    how many turns of its rank lie between the passes of a micro-batch."""
    return between >= BESIDE


def stays(between: int, is_last: bool, is_first: bool) -> bool:
    """True for a value of a stage that would be away for no turn. is_last: its copy out ends with its graph; is_first:
    its copy back starts where the graph begins that reads it."""
    if goes_beside(between):
        return False
    return is_last or is_first if between else is_last and is_first
