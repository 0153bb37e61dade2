"""A graph's numbers with all equal layers of further lists, from those of the three that its program has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.planning.shallow.events import Events, Own
from autopar.planning.shallow.further_layers import FurtherLayers
from autopar.planning.shallow.graph_track import border_of
from autopar.planning.shallow.sheet import NONE, Sheet, SheetCall, sum_of

Copy = tuple[int, int]  # a call, by its place, and which of its copies


def with_all_layers(sheet: Sheet, others: Sequence[FurtherLayers]) -> Sheet:
    """With the calls of all layers: between the first and the last of three, those of the second again and again."""
    calls, reads = list(sheet.calls), sheet.reads
    for number, each in enumerate(others):
        calls = _Longer.of(calls, number, each).calls()
        reads = frozenset(name for read in reads for name in each.names(read))
    ahead = NONE if sheet.ahead == NONE else sum_of(call.kept for call in calls)
    return replace(sheet, calls=tuple(calls), reads=reads, ahead=ahead)


@dataclass(frozen=True, slots=True)
class _Longer:
    """start, end: between which calls are copied, those of the second layer and what of its neighbours lies among them;
    none where the layers do not follow each other. order: of all calls. shifts: by how much the numbers of layers grow
    before these calls, and behind them."""

    given: Sequence[SheetCall]
    others: FurtherLayers
    start: int
    end: int
    order: Sequence[Copy]
    shifts: tuple[int, int]

    @classmethod
    def of(cls, calls: Sequence[SheetCall], number: int, others: FurtherLayers) -> _Longer:
        """number: that the layers have in `SheetCall.other`."""
        own = [call.other[1] if call.other[0] == number and call.launch is not None else -1 for call in calls]
        places = [[i for i, layer in enumerate(own) if layer == each] for each in range(3)]
        copies = range(others.more + 1)
        if all(places) and (places[0][0] < places[1][0]) == (places[1][0] < places[2][0]):
            before, second, behind = places if places[0][0] < places[1][0] else places[::-1]
            start, end = border_of(before, second), border_of(second, behind)
            order = [(i, 0) for i in range(start)]
            order += [(i, copy) for copy in copies for i in range(start, end)]
            order += [(i, others.more) for i in range(end, len(calls))]
            shifts = (0, others.more) if before is places[0] else (others.more, 0)
            return cls(calls, others, start, end, order, shifts)
        second = [call.other == (number, 1) for call in calls]
        order = [(i, copy) for i, is_copied in enumerate(second) for copy in (copies if is_copied else (0,))]
        return cls(calls, others, 0, 0, order, (0, 0))

    def calls(self) -> list[SheetCall]:
        place = {copy: i for i, copy in enumerate(self.order)}
        return [self._call(i, copy, place) for i, copy in self.order]

    def _call(self, at: int, copy: int, place: Mapping[Copy, int]) -> SheetCall:
        call = self.given[at]
        dying = tuple(found for other in call.dying if (found := self._found(at, copy, other, place)) >= 0)
        launch = call.launch
        if launch is not None and launch.awaits >= 0:
            launch = replace(launch, awaits=self._found(at, copy, launch.awaits, place, must=True))
        return call._replace(dying=dying, launch=launch, events=_renamed(call.events, self._moved(at, copy)))

    def _found(self, at: int, copy: int, other: int, place: Mapping[Copy, int], must: bool = False) -> int:
        """Where an earlier call is that a copy of one names; -1 where the first copy was the last to read it."""
        if (other, copy) in place:
            return place[other, copy]
        length = self.end - self.start
        if self.start <= at < self.end and copy and other + length >= self.start:  # of the copy before
            like, known = self.given[other + length], self.given[other]
            if (like.own, like.launch is None) == (known.own, known.launch is None):
                return place[other + length, copy - 1]
        return place.get((other, 0), -1) if must or not copy or at >= self.end else -1

    def _moved(self, at: int, copy: int) -> Callable[[str], str]:
        before, behind = self.shifts
        if self.start <= at < self.end:
            by = copy if before <= behind else self.others.more - copy
            return lambda name: self.others.moved(name, by)
        by = before if at < self.start else behind
        return lambda name: self.others.moved(name, by, least=1)


def _renamed(events: Events, moved: Callable[[str], str]) -> Events:
    def own(of: Own) -> Own:
        return of._replace(name=moved(of.name)) if of.layer < 0 else of

    if not any(events):
        return events
    reads = tuple(replace(each, own=own(each.own), unit=moved(each.unit)) for each in events.reads)
    gives = tuple(replace(each, own=own(each.own)) for each in events.gives)
    return Events(reads, tuple(map(own, events.ends)), gives)
