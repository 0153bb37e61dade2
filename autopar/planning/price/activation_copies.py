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
from autopar.passes.offload.when_copied import AHEAD, BEHIND, Coming, Going, ends_out, goes_beside, starts_back, stays
from autopar.planning.shallow.events import OUTSIDE
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, Road

Step = tuple[str, int]  # of a kind of graph; behind its last one what happens at its end


class StepCopy(NamedTuple):
    """value: the number of the step that makes it. way: out or back."""

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
    """before: of each step of the graphs. bytes_: that wait at most. out, back: those of them that go behind the
    forward graph, and come before the backward graph, beside the turns of other micro-batches."""

    before: Mapping[Step, tuple[StepCopy, ...]]
    bytes_: float
    out: float = 0.0
    back: float = 0.0

    @classmethod
    def of(cls, roads: Mapping[str, Road], part: float, machine: Machine) -> Copies:
        """part: of what may move, of each layer. What would be read again as soon as it is away stays, as in the pass
        (`kept_of` in passes/offload/choose_moves.py)."""
        line = _Line(roads, machine)
        all_ = list(line.kept())
        ends, starts = line.places(all_)
        free = [one for one, end, start in zip(all_, ends, starts, strict=True) if end < line.middle or end < start]
        moved = [one._replace(bytes_=part * one.bytes_) for one in free]
        return cls(line.before(moved, moved), sum(one.bytes_ for one in moved))

    @classmethod
    def of_stage(cls, roads: Mapping[str, Road], part: float, machine: Machine, between: int) -> Copies:
        """between: turns of its rank between the passes, which decide what stays and what goes beside them, as in the
        pass (`passes/offload/offload_stages.py`)."""
        line = _Line(roads, machine)
        all_ = list(line.kept())
        ends, starts = line.places(all_)
        moved, out, back = list[_Kept](), set[_Kept](), set[_Kept]()
        for one, end, start in zip(all_, ends, starts, strict=True):
            is_last, is_first = end == line.middle, start <= line.middle
            if not stays(between, is_last, is_first):
                less = one._replace(bytes_=part * one.bytes_)
                moved.append(less)
                out |= {less} if is_last and goes_beside(between) else set()
                back |= {less} if is_first and goes_beside(between) else set()
        inside = line.before([one for one in moved if one not in out], [one for one in moved if one not in back])
        return cls(inside, *(sum(one.bytes_ for one in some) for some in (moved, out, back)))


class _Line:
    """The steps of both passes in a row. middle: where the backward pass begins."""

    def __init__(self, roads: Mapping[str, Road], machine: Machine) -> None:
        self.roads, self.machine = roads, machine
        self.middle = len(roads[FORWARD].steps)
        steps = [each.step for kind in (FORWARD, BACKWARD) for each in roads[kind].steps]
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
            levels = list(accumulate(forward.steps[place].step.left for place in own))
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

    def before(self, out: list[_Kept], back: list[_Kept]) -> Mapping[Step, tuple[StepCopy, ...]]:
        """`Copies.before`, of what goes in the forward graph and what comes in the backward graph."""
        events = list[tuple[int, str, bool, _Kept]]()
        for one, end in zip(out, self.places(out)[0], strict=True):
            events += [(one.made + 1, OUT, True, one), (end, OUT, False, one)]
        for one, start in zip(back, self.places(back)[1], strict=True):
            events += [(start, BACK, True, one), (one.use, BACK, False, one)]
        found = defaultdict[Step, list[StepCopy]](list)
        for place, way, is_start, one in events:
            found[self.step(place, way)].append(StepCopy(one.made, way, is_start, one.bytes_))
        return {step: tuple(sorted(each, key=lambda copy: not copy.starts)) for step, each in found.items()}

    def step(self, place: int, way: str) -> Step:
        """The step at a place. What goes out has gone when the forward pass ends."""
        return (FORWARD, place) if way == OUT else (BACKWARD, place - self.middle)


def _begun(road: Road) -> list[int]:
    """How many layers have begun at each step of a pass; what lies outside of the equal ones are others, by what reads
    parameters there."""
    seen, found, unit = set[tuple[int, str]](), list[int](), ""
    for layer, step in zip(road.layers, road.steps, strict=True):
        if layer == OUTSIDE and step.reads:
            unit = step.reads[-1][1].unit
        seen.add((layer, unit if layer == OUTSIDE else ""))
        found.append(len(seen))
    return found
