"""The stages of a pipeline over a model of equal layers, cut as the compiler cuts: by time, inside layers too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.machines import Machine
from autopar.passes.pipeline.cut import Limits, Line
from autopar.passes.pipeline.when import times_of
from autopar.planning.depth import Rest
from autopar.planning.stage import Micro
from autopar.planning.weights import Weight, weights_of

KINDS = ("time", "stored", "saved")
CLOSE = 1e-5  # of the slowest stage: how near the search for it comes


@dataclass(frozen=True, slots=True)
class Part:
    """What of a model something has. entry, behind: the share of what comes before the equal layers, and behind them.
    layers: how many of these."""

    entry: float
    layers: float
    behind: float

    def __add__(self, other: Part) -> Part:
        return Part(self.entry + other.entry, self.layers + other.layers, self.behind + other.behind)


@dataclass(frozen=True, slots=True)
class Share:
    """What of a model a stage has, or a rank: of its time, of its parameters, of what it keeps for the backward pass.
    A layer that is cut through has most of its parameters in one half and most of its time, maybe, in the other."""

    time: Part
    stored: Part
    saved: Part

    def __add__(self, other: Share) -> Share:
        return Share(self.time + other.time, self.stored + other.stored, self.saved + other.saved)


def whole(layers: int) -> Share:
    """All of a model."""
    all_ = Part(1.0, layers, 1.0)
    return Share(all_, all_, all_)


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
    def of(cls, line: Line, first: int, last: int, weights: Mapping[fx.Node, Weight]) -> Section:
        """Between two places of a line. weights: of the program."""
        part = slice(first, last + 1)
        time, stored, saved = (values[part] - values[first] for values in (line.times, line.held, line.saved))
        uses = sorted((_place(line, use + 1) - 1, i, node) for i, (node, (_, use)) in enumerate(line.firsts.items()))
        own = [(place - first, node) for place, _, node in uses if first <= place < last and node in weights]
        placed = (replace(weights[node], place=at, at=float(time[at] / time[-1])) for at, node in own)
        return cls(time, stored, saved, line.transfer[part], tuple(placed))

    def beside(self, longer: float, crossing: float, us: Callable[[Weight], float]) -> Section:
        """The same of other rows, with what moves over the data axes. longer, crossing: how many times as long it takes
        to compute, and to send. us: of what moves of a weight."""
        time = self.time * longer
        for weight in self.weights:
            time[weight.place + 1 :] += us(weight)
        return replace(self, time=time, crossing=self.crossing * crossing)


@dataclass(frozen=True, slots=True)
class Sections:
    """The forward pass of a model: what comes before its equal layers, one of these, what comes behind them."""

    entry: Section
    layer: Section
    behind: Section

    @classmethod
    def of(cls, micro: Micro, rest: Rest, machine: Machine, mesh: Mesh) -> Sections:
        """mesh: that says over which links stages send."""
        program = micro.program
        line = Line(program, times_of(program, micro.plan.parts), Limits((1,), machine=machine, mesh=mesh))
        layers = [rest.layer(node) for node in line.nodes]
        own = [i for i, path in enumerate(layers) if path == rest.path]
        all_ = [i for i, path in enumerate(layers) if path in rest.equal]
        begin, start, end, behind = (_place(line, at) for at in (all_[0], own[0], own[-1] + 1, all_[-1] + 1))
        ends, weights = ((0, begin), (start, end), (behind, len(line.places) - 1)), weights_of(program)
        return cls(*(Section.of(line, *pair, weights) for pair in ends))

    def stages(self, layers: int, count: int, by: Sections | None = None) -> list[Share]:
        """`count` stages of a model of so many layers, the slowest as fast as can be, the others as even as can be.
        by: the same model with the times that count for that."""
        road = (by or self)._road(layers)
        borders = road.even(count)
        road = self._road(layers)
        last = layers + 1
        inner = [tuple(_before(road, at, name, last) for name in KINDS) for at in borders[:-1]]
        marks = [(Part(0.0, 0, 0.0),) * len(KINDS), *inner, (Part(1.0, layers, 1.0),) * len(KINDS)]
        return [Share(*map(_minus, high, low)) for low, high in pairwise(marks)]

    def _road(self, layers: int) -> _Road:
        return _Road.of([self.entry, *[self.layer] * layers, self.behind])


def _place(line: Line, node: int) -> int:
    """The first place that has so many nodes before it."""
    return next(i for i, place in enumerate(line.places) if place >= node)


def _minus(more: Part, less: Part) -> Part:
    return Part(more.entry - less.entry, more.layers - less.layers, more.behind - less.behind)


@dataclass(frozen=True, slots=True)
class _Road:
    """Sections one behind the other. section, inner: of each place its section, and where it lies there."""

    sections: Sequence[Section]
    time: np.ndarray
    crossing: np.ndarray
    section: np.ndarray
    inner: np.ndarray

    @classmethod
    def of(cls, sections: Sequence[Section]) -> _Road:
        sizes = [len(each.time) - 1 for each in sections]  # the last place of one is the first of the next
        starts = np.concatenate([[0.0], np.cumsum([each.time[-1] for each in sections])])
        time = np.concatenate([each.time[:-1] + at for each, at in zip(sections, starts, strict=False)])
        crossing = np.concatenate([each.crossing[:-1] for each in sections])
        section = np.repeat(np.arange(len(sections)), sizes)
        inner = np.concatenate([np.arange(size) for size in sizes])
        return cls(
            sections, np.append(time, starts[-1]), np.append(crossing, 0.0), np.append(section, len(sections) - 1),
            np.append(inner, sizes[-1]),
        )  # fmt: skip

    def even(self, count: int) -> list[int]:
        """The places where stages end."""
        low = float(self.time[-1]) / count
        high = low + float(np.diff(self.time).max() + 2 * self.crossing.max())  # a stage that goes on reaches this
        limit = _least(low, high, _Farthest.of(self, count).may_end)
        if not self._is_enough(count, limit):
            limit = _least(low, high, partial(self._is_enough, count))
        ends, begins = self._ends(count, limit), self._reversed()._ends(count, limit)[-2::-1]
        windows = [np.nonzero(end & begin[::-1])[0] for end, begin in zip(ends, begins, strict=False)]
        return self._squares([*windows, np.array([len(self.time) - 1])], limit)

    def _is_enough(self, count: int, limit: float) -> bool:
        return bool(self._ends(count, limit)[-1][-1])

    def _squares(self, windows: Sequence[np.ndarray], limit: float) -> list[int]:
        """The ends of stages, each from its window, with the least sum of squares of times within a limit."""
        most, size = limit * (1 + 1e-9), len(self.time)
        ahead, behind = self.time + self.crossing, self.time - self.crossing
        reach = np.arange(size) - np.searchsorted(self.time, ahead - most) + 1  # places that a stage may go on for
        before, first, choices = np.where(np.arange(size) == 0, 0.0, np.inf), 0, list[np.ndarray]()
        for ends in windows:
            wide = max(1, min(int(reach[ends].max()), int(ends[-1]) - first))
            took = ahead[ends, None] - _before_each(ends, wide, behind)
            value = took * took
            value += _before_each(ends, wide, before)
            np.putmask(value, took > most, np.inf)
            choice = value.argmin(axis=1)
            before, starts, first = np.full(size, np.inf), np.zeros(size, int), int(ends[0])
            before[ends], starts[ends] = value[np.arange(len(ends)), choice], ends - wide + choice
            choices.append(starts)
        found = [int(windows[-1][0])]
        for starts in choices[:0:-1]:
            found.append(int(starts[found[-1]]))
        return found[::-1]

    def _ends(self, count: int, limit: float) -> list[np.ndarray]:
        """For each of `count` stages the places where it may end, so that it and all before it keep to a limit."""
        ahead, behind = self.time + self.crossing, self.time - self.crossing
        found, ends = list[np.ndarray](), np.arange(len(self.time)) == 0
        for _ in range(count):
            latest = np.maximum.accumulate(np.where(ends, behind, -np.inf))
            ends = np.append(False, ahead[1:] <= latest[:-1] + limit * (1 + 1e-9))
            found.append(ends)
        return found

    def _reversed(self) -> _Road:
        return replace(self, time=(self.time[-1] - self.time)[::-1], crossing=self.crossing[::-1])


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


def _before_each(ends: np.ndarray, count: int, values: np.ndarray) -> np.ndarray:
    """A row for each end, with the `count` values before it; infinite where there are none."""
    return sliding_window_view(np.concatenate([np.full(count, np.inf), values]), count)[ends]


def _before(road: _Road, at: int, name: str, last: int) -> Part:
    """What comes before a place. name: of what is counted. last: the section behind the layers."""
    number, inner = int(road.section[at]), int(road.inner[at])
    values = getattr(road.sections[number], name)
    share = float(values[inner] / values[-1]) if values[-1] else float(inner > 0)
    if number == 0:
        return Part(share, 0.0, 0.0)
    return Part(1.0, number - 1 + share, 0.0) if number < last else Part(1.0, last - 1, share)
