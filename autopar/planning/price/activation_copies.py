"""What the layers of a micro-batch keep in the host's memory, and before which steps its copies start and are awaited:
by the decisions of the pass that emits them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from autopar.machines import Machine
from autopar.passes.costs.streams import BACK, OUT
from autopar.passes.offload.when_copied import AHEAD, BEHIND, Coming, Going, ends_out, starts_back
from autopar.planning.shallow.events import OUTSIDE
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, Road

Step = tuple[str, int]  # of a kind of graph; behind its last one what happens at its end


class StepCopy(NamedTuple):
    """value: a number of its own. way: out or back."""

    value: int
    way: str
    starts: bool
    bytes_: float


class _Kept(NamedTuple):
    """What a step of the forward pass leaves to the backward pass. use: where the layer begins there that reads it."""

    made: int
    use: int
    bytes_: float


@dataclass(frozen=True, slots=True)
class Copies:
    """before: of each step. bytes_: that wait at most. movable: those that would if all moved that may."""

    before: Mapping[Step, tuple[StepCopy, ...]]
    bytes_: float
    movable: float

    @classmethod
    def of(cls, roads: Mapping[str, Road], part: float, machine: Machine) -> Copies:
        """part: of what may move, of each layer. What would be read again as soon as it is away stays, as in the pass
        (`kept_of` in passes/offload/choose_moves.py)."""
        line = _Line(roads, machine)
        all_ = list(line.kept())
        ends, starts = line.places(all_)
        free = [one for one, end, start in zip(all_, ends, starts, strict=True) if end < line.middle or end < start]
        moved = [one._replace(bytes_=part * one.bytes_) for one in free]
        before = defaultdict[Step, list[StepCopy]](list)
        for value, (one, end, start) in enumerate(zip(moved, *line.places(moved), strict=True)):
            events = (one.made + 1, OUT, True), (end, OUT, False), (start, BACK, True), (one.use, BACK, False)
            for place, way, is_start in events:
                before[line.step(place, way)].append(StepCopy(value, way, is_start, one.bytes_))
        ordered = {step: tuple(sorted(each, key=lambda copy: not copy.starts)) for step, each in before.items()}
        return cls(ordered, sum(one.bytes_ for one in moved), sum(one.bytes_ for one in free))


class _Line:
    """The steps of both passes in a row. middle: where the backward pass begins."""

    def __init__(self, roads: Mapping[str, Road], machine: Machine) -> None:
        self.roads, self.machine = roads, machine
        self.middle = len(roads[FORWARD].steps)
        steps = [step for kind in (FORWARD, BACKWARD) for _, step in roads[kind].steps]
        self.clock = list(accumulate((step.busy + step.waits for step in steps), initial=0.0))
        self.begun = [*_begun(roads[FORWARD]), *_begun(roads[BACKWARD])]
        self.end = len(steps)

    def kept(self) -> Iterator[_Kept]:
        """What each step leaves to the layers of the backward pass, in the order of the forward pass."""
        forward, backward, uses = self.roads[FORWARD], self.roads[BACKWARD], dict[int, int]()
        for place, layer in enumerate(backward.layers):
            uses.setdefault(layer, self.middle + place)
        for layer, run in groupby(range(self.middle), key=forward.layers.__getitem__):
            own = list(run)
            levels = list(accumulate(forward.steps[place][1].left for place in own))
            stays = [0.0, *(max(0.0, min(levels[i:])) for i in range(len(levels)))]  # the rest dies in the layer
            for place, (before, now) in zip(own, pairwise(stays), strict=True):
                reader = layer + (place == own[-1])  # what a layer gives, or stands before all, is the next one's
                if now > before and reader in uses and reader != OUTSIDE:
                    yield _Kept(place, uses[reader], now - before)

    def places(self, values: list[_Kept]) -> tuple[list[int], list[int]]:
        """Where the copies of values out are awaited, and those back start."""
        us = [self.machine.copy_us(one.bytes_) for one in values]
        going, coming = list[Going](), list[Coming]()
        for one, each in zip(values, us, strict=True):
            latest = bisect_left(self.begun, self.begun[one.made] + BEHIND + 1, one.made, self.middle)
            going.append(Going(one.made, latest, min(one.made + 2, self.middle), each))
            coming.append(Coming(one.use, bisect_left(self.begun, self.begun[one.use] - AHEAD, self.middle), each))
        return ends_out(going, self.clock, self.middle), starts_back(coming, self.clock)

    def step(self, place: int, way: str) -> Step:
        """The step at a place. What goes out has gone when the forward pass ends."""
        return (FORWARD, place) if way == OUT else (BACKWARD, place - self.middle)


def _begun(road: Road) -> list[int]:
    """How many layers have begun at each step of a pass; what lies outside of all is one before them, and one
    behind."""
    begun, before = list[int](), None
    for layer in road.layers:
        begun.append((begun[-1] if begun else 0) + (layer != before))
        before = layer
    return begun
