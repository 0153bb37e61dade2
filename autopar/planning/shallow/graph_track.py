"""A graph of a micro-batch as steps between the places where it reads parameters, or gives gradients away, and those of
as many equal layers as a model has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from autopar.ir.ops.measure import PIECE_BYTES
from autopar.machines import Machine
from autopar.passes.costs.streams import Streams
from autopar.planning.shallow.captures import KEPT
from autopar.planning.shallow.events import NO_EVENTS, OUTSIDE, Events, Gradient, Own, ParameterRead
from autopar.planning.shallow.sheet import Sheet, SheetCall

FORWARD, BACKWARD = "F", "B"
# Layers that are alike, before those that are left out, and behind them; the latter are a multiple of so many, since
# buckets of gradients may begin anew with every second or third layer.
STARTING, ENDING, TOGETHER = 12, 3, 6


class TrackStep(NamedTuple):
    """Calls of a graph, the first of which may read parameters, and the last of which may give gradients. busy: us of
    the device that computes; waits: for what moves over other axes than those of data; launched: us of the host that
    launches them. most: bytes alive at most, beside what was when the first
    began; left: when the last is done; last: at most in the last one."""

    events: Events
    busy: float
    waits: float
    launched: float
    most: float
    left: float
    last: float


class ParameterPlace(NamedTuple):
    """Where a graph reads a parameter, or gives a gradient. layer: the number in the model; -1: outside of all."""

    kind: str
    layer: int
    name: str


class RoadStep(NamedTuple):
    """A step of a graph of the whole model. reads, gives, ends: where that is in the model."""

    step: TrackStep
    reads: tuple[tuple[ParameterPlace, ParameterRead], ...] = ()
    gives: tuple[tuple[ParameterPlace, Gradient], ...] = ()
    ends: tuple[ParameterPlace, ...] = ()

    @classmethod
    def of(cls, kind: str, number: int, step: TrackStep) -> RoadStep:
        """number: that the first of the equal layers of its program has in the model."""

        def place(own: Own) -> ParameterPlace:
            layer, name = own
            return ParameterPlace(kind, OUTSIDE if layer == OUTSIDE else number + layer, name)

        events = step.events  # (a list takes less time than a generator, and a search of plans makes 500,000 steps)
        reads = tuple([(place(read.own), read) for read in events.reads])
        gives = tuple([(place(gradient.own), gradient) for gradient in events.gives])
        return cls(step, reads, gives, tuple([place(own) for own in events.ends]))


Steps = tuple[TrackStep, ...]
Calls = Sequence[tuple[SheetCall, TrackStep]]


@dataclass(frozen=True, slots=True)
class Track:
    """The steps of a graph. outer: of what comes before the equal layers, in the order of the graph, and behind them.
    ends: of the first and of the last of these layers; second: of the one behind the first; middle: of each other one.
    A model without equal layers has all in the first of `outer`."""

    outer: tuple[Steps, Steps]
    ends: tuple[Steps, Steps] = ((), ())
    second: Steps = ()
    middle: Steps = ()

    @classmethod
    def of(cls, kind: str, sheet: Sheet, times: Sequence[float], machine: Machine) -> Track:
        """kind: of the graph's action. times: us of its calls."""
        steps = list(_steps(sheet, times, machine))
        order = (0, 1, 2) if kind == FORWARD else (2, 1, 0)
        calls = [(i, call.layer) for i, (call, _) in enumerate(steps) if call.launch is not None]  # and no views
        places = [[i for i, own in calls if own == layer] for layer in order]
        if not all(places):
            return cls((_joined(steps), ()))
        first, middle, last, end = (
            places[0][0], border_of(places[0], places[1]), border_of(places[1], places[2]), places[2][-1] + 1,
        )  # fmt: skip
        parts = [steps[:first], steps[first:middle], steps[middle:last], steps[last:end], steps[end:]]
        steady = _steady(parts[2], parts[3], order)
        before, begin, second, ending, behind = map(_joined, parts)
        return cls((before, behind), (begin, ending), second, _joined(steady))


def border_of(before: Sequence[int], behind: Sequence[int]) -> int:
    """Where one layer ends and the next one begins: so that the fewest calls lie on the wrong side, of which some are
    computed later than they stand, to hide what moves, and some earlier, since the layer before computes them again.
    before, behind: the places of their calls."""
    return min(behind, key=lambda at: len(before) - bisect_left(before, at) + bisect_left(behind, at))


def _steady(second: Calls, last: Calls, order: tuple[int, int, int]) -> Calls:
    """A layer of many, from the second and the last one of three: what the second computes later than it stands, in
    the last one, so does each. order: of the layers, as the graph has them."""
    before, own, behind = order
    late = [i for i, (call, _) in enumerate(last) if call.layer == own]
    if sum(call.layer == before for call, _ in second) == len(late):
        return second
    steady: list[tuple[SheetCall, TrackStep]] = []
    at = {sum(call.layer == behind for call, _ in last[:i]): list[tuple[SheetCall, TrackStep]]() for i in late}
    for i in late:
        at[sum(call.layer == behind for call, _ in last[:i])].append(last[i])
    count = 0
    for call, step in second:
        if call.layer == before:
            continue
        steady.append((call, step))
        if call.layer == own:
            count += 1
            steady += [(each, _earlier(step, own, before)) for each, step in at.get(count, ())]
    return steady


def _earlier(step: TrackStep, own: int, before: int) -> TrackStep:
    """A step of one layer as that of the layer before it in a graph."""

    def moved(of: Own) -> Own:
        return of._replace(layer=before) if of.layer == own else of

    reads, ends, gives = step.events
    events = Events(
        tuple(replace(each, own=moved(each.own)) for each in reads), tuple(map(moved, ends)),
        tuple(replace(each, own=moved(each.own)) for each in gives),
    )  # fmt: skip
    return step._replace(events=events)


def _steps(sheet: Sheet, times: Sequence[float], machine: Machine) -> Iterator[tuple[SheetCall, TrackStep]]:
    """Each call as a step."""
    streams, alive, busy, waited = Streams(machine), 0.0, 0.0, 0.0
    for place, (call, us) in enumerate(zip(sheet.calls, times, strict=True)):
        launched = 0.0
        if call.launch is not None:
            streams.launch(place, call.launch, us)
            launched = machine.launch_us * (call.launch.awaits < 0)
        now, waits, before = streams.computed, streams.device - streams.hosted - streams.computed, alive
        kept = call.kept[False]
        most = call.own + max(0.0, kept) + min(call.widened, PIECE_BYTES)
        alive += call.own + kept - sum(sheet.calls[other].own for other in call.dying)
        yield call, TrackStep(call.events, now - busy, waits - waited, launched, most, alive - before, most)
        busy, waited = now, waits


def _joined(steps: Calls) -> Steps:
    """Steps one behind the other as one, where nothing is read or given between them."""
    joined: list[TrackStep] = []
    for _, step in steps:
        before = joined[-1] if joined else None
        if before is None or before.events.gives or before.events.ends or step.events.reads:
            joined.append(step)
            continue
        events = Events(before.events.reads, step.events.ends, step.events.gives)
        most, left, last = max(before.most, before.left + step.most), before.left + step.left, before.left + step.last
        busy, waits, launched = (one + other for one, other in zip(before[1:4], step[1:4], strict=True))
        joined[-1] = TrackStep(events, busy, waits, launched, most, left, last)
    return tuple(joined)


class LeftOut(NamedTuple):
    """Equal layers that a road is without. begins: the steps with which the layers before them begin, and the one
    behind them. like: the number of the layer before them. layers: of them."""

    begins: tuple[int, ...]
    like: int
    layers: int


@dataclass(frozen=True, slots=True)
class Road:
    """The steps of the graph of a whole model. layers: the equal layer of each step. left_out: of a road that is
    shorter than the model; its layers are numbered as those of a model without these."""

    kind: str
    steps: tuple[RoadStep, ...]
    layers: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(
        cls, kind: str, less: Track, more: Track, layers: int, again: int, ends: tuple[bool, bool] = (True, True),
        is_short: bool = False,
    ) -> Road:  # fmt: skip
        """less, more: of the policies of recomputation of most layers, and of the first ones, `again` of them. ends:
        whether it has what comes before the layers, in the order of the forward pass, and what lies behind them.
        is_short: leave out the inner ones of many layers that are alike."""
        gone = [_too_many(again), _too_many(layers - again)] if is_short else [0, 0]
        layers, again = layers - sum(gone), again - gone[0]
        is_forward, last = kind != BACKWARD, max(layers - KEPT, 0)
        has_first, has_last = ends if is_forward else ends[::-1]
        found = [(0 if is_forward else last, step) for step in less.outer[0] if has_first]
        numbers, begins = [OUTSIDE] * len(found), list[int]()
        for at in range(layers):
            begins.append(len(found))
            number = at if is_forward else layers - 1 - at
            track = more if number < again else less
            own = {0: track.ends[0], 1: track.second, layers - 1: track.ends[1]}.get(at, track.middle)
            found += [(min(max(number - 1, 0), last), step) for step in own]
            numbers += [number] * len(own)
        behind = tuple((last if is_forward else 0, step) for step in less.outer[1] if has_last)
        alike = list(zip((again, layers - again), gone, strict=True))
        left_out = tuple(_left_out(begins, numbers, alike if is_forward else alike[::-1]))
        steps = tuple(RoadStep.of(kind, *each) for each in (*found, *behind))
        return cls(kind, steps, (*numbers, *[OUTSIDE] * len(behind)), left_out)

    def with_piece(self, layer: int) -> Road:
        """With a piece of a layer that the forward pass comes to last, too small to take time or bytes."""
        step, number = RoadStep(TrackStep(NO_EVENTS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), (layer,)
        if self.kind == FORWARD:
            return replace(self, steps=(*self.steps, step), layers=(*self.layers, *number))
        return replace(self, steps=(step, *self.steps), layers=(*number, *self.layers))

    def reads(self) -> Iterator[tuple[ParameterPlace, ParameterRead]]:
        return chain.from_iterable(step.reads for step in self.steps)

    def gives(self) -> Iterator[tuple[ParameterPlace, Gradient]]:
        return chain.from_iterable(step.gives for step in self.steps)


def _too_many(layers: int) -> int:
    """How many layers of some that are alike may be left out: the first and the second one are others, and some more
    pass until all that follow move and hold what those before them did."""
    return max(0, layers - (2 + STARTING + ENDING)) // TOGETHER * TOGETHER


def _left_out(begins: Sequence[int], numbers: Sequence[int], alike: Iterable[tuple[int, int]]) -> Iterator[LeftOut]:
    """begins: of the layers, in the order of the graph. numbers: the layer of each step. alike: how many layers behind
    each other are alike, and how many more there would be."""
    end = 0
    for layers, count in alike:
        end += layers
        if count:
            at = end - ENDING
            yield LeftOut(tuple(begins[at - STARTING : at + 1]), numbers[begins[at - 1]], count)
