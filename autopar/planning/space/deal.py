"""The stages of a pipeline over a model of equal layers, cut as the compiler cuts: by time, inside layers too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.machines import Machine
from autopar.passes.pipeline.cuts.cut import ForwardLine, StageLimits
from autopar.passes.pipeline.cuts.when import times_of
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.further_layers import FurtherLayers
from autopar.planning.shallow.parameter_use import Weight, first_read, tied_weights, weights_of
from autopar.planning.shallow.stage_graphs import Micro

KINDS = ("time", "stored", "saved")
Ranges = tuple[tuple[int, int], ...]  # of layers, each from one to before another
Moved = tuple[tuple[float, ...], ...]  # us of what moves of each weight, by section
CLOSE = 1e-5  # of the slowest stage: how near the search for it comes


@dataclass(frozen=True, slots=True)
class Part:
    """What of a model something has. entry, behind: the share of what comes before the equal layers, and behind them.
    layers: how many of these; again: how many of them compute more again than the others."""

    entry: float
    layers: float
    behind: float
    again: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(
            self.entry + other.entry, self.layers + other.layers, self.behind + other.behind, self.again + other.again
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """What of a model a stage has, or a rank: of its time, of its parameters, of what it keeps for the backward pass.
    A layer that is cut through has most of its parameters in one half and most of its time, maybe, in the other. rest:
    of a stage, by what they keep, the layers behind the last one that computes more again."""

    time: Part
    stored: Part
    saved: Part
    rest: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.time + other.time, self.stored + other.stored, self.saved + other.saved)


def whole(layers: int, again: int = 0) -> Share:
    """All of a model. again: how many of its layers, the first ones, compute more again."""
    all_ = Part(1.0, layers, 1.0, again)
    return Share(all_, all_, all_, layers - again)


class FurtherSpan(NamedTuple):
    """Two places of a line, between which a layer lies of which there are more."""

    others: FurtherLayers
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of the forward pass with the places where it may be cut. time, stored, saved: us and bytes of what comes
    before each, from 0 at its beginning on. crossing: us to send what is needed on both sides. weights: in the order of
    their first uses."""

    time: np.ndarray
    stored: np.ndarray
    saved: np.ndarray
    crossing: np.ndarray
    weights: tuple[Weight, ...] = ()

    @classmethod
    def of(
        cls, line: ForwardLine, first: int, last: int, weights: Mapping[fx.Node, Weight],
        firsts: Mapping[fx.Node, int], others: Sequence[FurtherSpan] = (),
    ) -> Section:  # fmt: skip
        """Between two places of a line. weights: of the program; firsts: the numbers of the calls that need each
        first. others: the layers of further lists, of which more come."""
        part = slice(first, last + 1)
        time, stored, saved = (values[part] - values[first] for values in (line.times, line.held, line.saved))
        uses = sorted((_place(line, use + 1) - 1, i, node) for i, (node, use) in enumerate(firsts.items()))
        own = [(place - first, node) for place, _, node in uses if first <= place < last and node in weights]
        placed = tuple(replace(weights[node], place=at) for at, node in own)
        found = cls(time, stored, saved, line.transfer[part], placed)
        for span in sorted(others, key=lambda span: -span.begin):  # what stands before a place keeps its own
            if first <= span.begin < span.end <= last:
                found = found._longer(span.begin - first, span.end - first, span.others)
        total = found.time[-1]
        return replace(
            found, weights=tuple(replace(each, at=float(found.time[each.place] / total)) for each in found.weights)
        )

    def _longer(self, begin: int, end: int, others: FurtherLayers) -> Section:
        """With what lies between two places as often as there are such layers."""
        inner, count = [*range(begin, end)] * (others.more + 1), len(self.time) - 1
        steps = [*range(begin), *inner, *range(end, count)]
        before = self.time, self.stored, self.saved
        time, stored, saved = (np.concatenate([[0.0], np.cumsum(np.diff(each)[steps])]) for each in before)
        length, weights = end - begin, list[Weight]()
        for each in self.weights:
            if each.place < begin:
                weights.append(each)
                continue
            copies = range(others.more + 1) if each.place < end else [others.more]
            weights += [
                replace(
                    each, place=each.place + copy * length, name=others.moved(each.name, copy, least=1),
                    unit=others.moved(each.unit, copy, least=1),
                )
                for copy in copies
            ]  # fmt: skip
        weights.sort(key=lambda each: each.place)
        return Section(time, stored, saved, self.crossing[[*steps, count]], tuple(weights))

    def with_moved(self, moved: Sequence[float]) -> Section:
        """The section with what moves of each of its weights."""
        time = self.time.copy()
        for weight, us in zip(self.weights, moved, strict=True):
            time[weight.place + 1 :] += us
        return replace(self, time=time)

    @property
    def places(self) -> np.ndarray:
        """Where a cut may be best, the last place left out: where another one makes the stages on both sides no
        longer, none is. The ends of the model, which nothing crosses, are no cuts."""
        time, crossing = self.time, self.crossing
        less = crossing[:, None] - crossing
        near = (np.abs(time[:, None] - time) <= less) & (crossing > 0)
        first = np.arange(len(time))[:, None] > np.arange(len(time))
        worse = (near & ((less > 0) | first)).any(axis=1)
        worse[0] = False
        return np.nonzero(~worse[:-1])[0]


@dataclass(frozen=True, slots=True)
class Sections:
    """The forward pass of a model: what comes before its equal layers, one of these, what comes behind them. again: one
    of the layers that compute more again than the others, if there are such."""

    entry: Section
    layer: Section
    behind: Section
    again: Section | None = None

    @classmethod
    def of(cls, micro: Micro, rest: Rest, machine: Machine, mesh: Mesh) -> Sections:
        """mesh: that says over which links stages send."""
        program = micro.program
        line = ForwardLine(program, times_of(program, micro.plan.parts), StageLimits((1,), machine=machine, mesh=mesh))
        layers = [rest.layer(node) for node in line.nodes]
        own = [i for i, path in enumerate(layers) if path == rest.path]
        all_ = [i for i, path in enumerate(layers) if path in rest.equal]
        begin, start, end, behind = (_place(line, at) for at in (all_[0], own[0], own[-1] + 1, all_[-1] + 1))
        weights, firsts = weights_of(program), {node: use for node, (_, use) in line.firsts.items()}
        at, calls = line.places[behind], (line.nodes[: line.places[begin]], line.nodes[line.places[behind] :])
        first, last = tied_weights(weights, frozenset(calls[0]), frozenset(calls[1]), program.mesh)
        again = {node: at + first_read(node, calls[1]) for node in last}
        spans = [span for each in rest.others if (span := _span(line, layers, each)) is not None]
        return cls(
            Section.of(line, 0, begin, {**weights, **first}, firsts, spans),
            Section.of(line, start, end, weights, firsts),
            Section.of(line, behind, len(line.places) - 1, {**weights, **last}, {**firsts, **again}, spans),
        )

    @property
    def all(self) -> tuple[Section, ...]:
        """By the number that `Slot.section` has."""
        return self.entry, self.layer, self.behind, *([self.again] if self.again else [])

    def stages(self, layers: int, count: int, moved: Moved = (), ranges: Ranges = ()) -> list[Share]:
        """`count` stages of a model of so many layers, the slowest as fast as can be, the others as even as can be.
        moved: us of what moves of each weight, which count for that. ranges: of the layers that compute more again."""
        of = [*_is_again(layers, ranges)]
        road = _Road.of((self._with_moved(moved) if moved else self)._sections(of))
        at = road.even(count)[:-1]
        sections = self._sections(of)
        borders = list(zip(road.section[at].tolist(), road.inner[at].tolist(), strict=True))
        begin, end = (0.0, 0.0, 0.0, 0.0), (1.0, layers, 1.0, sum(of))
        marks = [np.array([begin, *_before(sections, borders, name, of), end]) for name in KINDS]
        parts = zip(*(np.diff(each, axis=0).tolist() for each in marks), strict=True)
        return [
            Share(Part(*time), Part(*stored), Part(*saved), _rest(low, high, ranges))
            for (time, stored, saved), (low, high) in zip(parts, pairwise(marks[-1][:, 1].tolist()), strict=True)
        ]

    def _with_moved(self, moved: Moved) -> Sections:
        return Sections(*(part.with_moved(us) for part, us in zip(self.all, moved, strict=True)))

    def _sections(self, of: Sequence[bool]) -> list[Section]:
        return [self.entry, *(self.again if more and self.again else self.layer for more in of), self.behind]


def _before(
    sections: Sequence[Section], borders: Iterable[tuple[int, int]], name: str, of: Sequence[bool]
) -> Iterator[tuple[float, float, float, float]]:  # fmt: skip
    """What comes before places, as of a `Part`. borders: of each place the number of its section, on the way through
    the model, and where it lies there. name: of what is counted. of: of each layer, whether it computes more again."""
    again = [0, *accumulate(of)]
    for number, inner in borders:
        values = getattr(sections[number], name)
        share = float(values[inner] / values[-1]) if values[-1] else float(inner > 0)
        if number == 0:
            yield share, 0.0, 0.0, 0.0
        elif number > len(of):
            yield 1.0, len(of), share, again[-1]
        else:
            yield 1.0, number - 1 + share, 0.0, again[number - 1] + share * of[number - 1]


def _is_again(layers: int, ranges: Ranges) -> Iterator[bool]:
    """Say of each layer whether it computes more again."""
    return (any(begin <= i < end for begin, end in ranges) for i in range(layers))


def _rest(low: float, high: float, ranges: Ranges) -> float:
    """How much of the layers between two places lies behind the last one that computes more again."""
    return high - max([low, *(min(end, high) for begin, end in ranges if begin < high and end > low)])


def _span(line: ForwardLine, layers: Sequence[str], others: FurtherLayers) -> FurtherSpan | None:
    """The places of a line between which the second of three layers lies. layers: of its nodes."""
    second, third = (next((i for i, path in enumerate(layers) if path == one), -1) for one in others.paths[1:])
    return FurtherSpan(others, _place(line, second), _place(line, third)) if 0 <= second < third else None


def _place(line: ForwardLine, node: int) -> int:
    """The first place that has so many nodes before it."""
    return next(i for i, place in enumerate(line.places) if place >= node)


@dataclass(frozen=True, slots=True)
class _Road:
    """The places of sections one behind the other. section, inner: of each its section, and where it lies there."""

    time: np.ndarray
    crossing: np.ndarray
    section: np.ndarray
    inner: np.ndarray

    @classmethod
    def of(cls, sections: Sequence[Section]) -> _Road:
        places = {key: each.places for key, each in {id(each): each for each in sections}.items()}
        own = [places[id(each)] for each in sections]  # the last place of one is the first of the next
        starts, counts = np.concatenate([[0.0], np.cumsum([each.time[-1] for each in sections])]), list(map(len, own))
        section, inner = np.repeat(np.arange(len(sections)), counts), np.concatenate(own)
        time, crossing = (_joined(sections, places, name) for name in ("time", "crossing"))
        time = time + np.repeat(starts[:-1], counts)
        return cls(
            np.append(time, starts[-1]), np.append(crossing, 0.0), np.append(section, len(sections) - 1),
            np.append(inner, len(sections[-1].time) - 1),
        )  # fmt: skip

    def even(self, count: int) -> list[int]:
        """The places where stages end."""
        low = float(self.time[-1]) / count
        high = low + float(np.diff(self.time).max() + 2 * self.crossing.max())  # a stage that goes on reaches this
        limit = _least(low, high, _Farthest.of(self, count).may_end)
        ends = self._ends(count, limit)
        if not ends[-1][-1]:
            limit = _least(low, high, lambda most: bool(self._ends(count, most)[-1][-1]))
            ends = self._ends(count, limit)
        begins = self._reversed()._ends(count, limit)[-2::-1]
        windows = [np.nonzero(end & begin[::-1])[0] for end, begin in zip(ends, begins, strict=False)]
        return self._squares([*windows, np.array([len(self.time) - 1])], limit)

    def _squares(self, windows: Sequence[np.ndarray], limit: float) -> list[int]:
        """The ends of stages, each from its window, with the least sum of squares of times within a limit."""
        most = limit * (1 + 1e-9)
        ahead, behind = self.time + self.crossing, self.time - self.crossing
        begins, before, choices = np.zeros(1, int), np.zeros(1), list[np.ndarray]()
        for ends in windows:
            took = ahead[ends, None] - behind[begins]
            value = took * took + before
            np.putmask(value, (took > most) | (begins >= ends[:, None]), np.inf)
            choices.append(value.argmin(axis=1))
            begins, before = ends, value.min(axis=1)
        at, found = 0, [int(windows[-1][0])]
        for ends, choice in zip(windows[-2::-1], choices[:0:-1], strict=True):
            at = int(choice[at])
            found.append(int(ends[at]))
        return found[::-1]

    def _ends(self, count: int, limit: float) -> np.ndarray:
        """A row for each of `count` stages: where it may end, so that it and all before it keep to a limit."""
        ahead, behind = self.time + self.crossing, self.time - self.crossing + limit * (1 + 1e-9)
        ends, found = np.arange(len(self.time)) == 0, np.zeros((count, len(self.time)), dtype=bool)
        for row in found:
            latest = np.maximum.accumulate(np.where(ends, behind, -np.inf))
            np.less_equal(ahead[1:], latest[:-1], out=row[1:])
            ends = row
        return found

    def _reversed(self) -> _Road:
        return replace(self, time=(self.time[-1] - self.time)[::-1], crossing=self.crossing[::-1])


def _joined(sections: Sequence[Section], places: Mapping[int, np.ndarray], name: str) -> np.ndarray:
    """What is known of the places of sections, one behind the other. places: by section."""
    values = {id(each): getattr(each, name) for each in sections}
    own = {key: each[places[key]] for key, each in values.items()}
    return np.concatenate([own[id(each)] for each in sections])


@dataclass(frozen=True, slots=True)
class _Farthest:
    """How far stages can go, where each begins at the best place that the one before may end at. start: of the first
    one. ahead: of all places the us to their end, sent values included, in their order; behind: the most us before what
    follows, of any place so far in this order. last: `ahead` of the last place."""

    count: int
    start: float
    ahead: Sequence[float]
    behind: Sequence[float]
    last: float

    @classmethod
    def of(cls, road: _Road, count: int) -> _Farthest:
        ahead, behind = (road.time + road.crossing)[1:], (road.time - road.crossing)[1:]
        order = ahead.argsort()
        most = np.maximum.accumulate(behind[order])
        return cls(count, -float(road.crossing[0]), ahead[order].tolist(), most.tolist(), float(ahead[-1]))

    def may_end(self, limit: float) -> bool:
        """False only if so many stages within a limit do not come to the end."""
        most, start = limit * (1 + 1e-9), self.start
        for _ in range(self.count - 1):
            place = bisect_right(self.ahead, start + most)
            if not place:
                return False
            start = self.behind[place - 1]
        return self.last <= start + most


def _least(low: float, high: float, is_enough: Callable[[float], bool]) -> float:
    """The least limit that is enough, nearly, above `low`. high: one that is."""
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
