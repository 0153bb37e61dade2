"""The step of a plan without a pipeline: its graphs, with what they move over the data axes, in time and in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.passes.overlap.bucket import Sum
from autopar.passes.overlap.prefetch import Gather
from autopar.planning.price.activation_copies import Copies
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import PART, SHARDS, Moving, Net, first_of, last_of, sums_of
from autopar.planning.price.steady import UnsteadyError
from autopar.planning.shallow.events import OUTSIDE, Gradient, ParameterRead
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, ParameterPlace, Road, Track
from autopar.planning.space.candidates import BY_STAGE, Candidate
from autopar.planning.space.deal import Part
from autopar.planning.space.split import Split

FIRST, LAST, BOTH = "P", "E", "FB"  # beside F: kinds of graphs
AGAIN = "A"  # the forward pass that a backward graph begins with, where a stage is computed again
Moves = list[tuple[bool, str, float]]


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Bytes at most, beside what is stored, and of several micro-batches what all of them read, and the gradients that
    they add to. forward, backward: in the last micro-batch, of which the backward graph lets go of what it read last;
    before: in the backward graph of earlier ones. once: in the sums behind the last. saved: of a micro-batch, from its
    forward to its backward graph."""

    forward: float
    backward: float
    before: float
    once: float
    saved: float = 0.0


@dataclass(frozen=True, slots=True)
class WholeStep:
    """us: of a micro-batch's graphs, F and B; before, after: of what runs once. moves: of each graph what it starts and
    awaits. waiting: bytes of what layers keep in the host's memory."""

    us: Mapping[str, float]
    before: float
    after: float
    peaks: StepPeaks
    moves: Mapping[str, Moves] = field(default_factory=dict)
    waiting: float = 0.0

    @classmethod
    def of(cls, candidate: Candidate, layers: Layers, split: Split, once: float, net: Net) -> WholeStep:
        """split: of its ranks. once: us of what is computed once a step, of whole parameters. Raises AutoparError as
        `Micros.local`."""
        roads = roads_of(candidate, layers, split)
        copies = Copies.of(roads, candidate.moved, net.machine) if candidate.moved else None
        for kinds in _short(candidate):
            fewer = roads_of(candidate, layers, split, is_short=True)
            short = {**roads, **{kind: fewer[kind] for kind in kinds}}
            with suppress(UnsteadyError):
                return _Asked(candidate, roads, short, net, copies).made(once)
        made = _Asked(candidate, roads, roads, net, copies).made(once)
        return replace(made, waiting=copies.bytes_) if copies is not None else made


def _short(candidate: Candidate) -> list[tuple[str, ...]]:
    """Which graphs are tried without layers that are like others: none where some of what a layer keeps waits in the
    host's memory, since it is on its way for long; the backward one with the forward one, and of several micro-batches,
    of which the forward graph leaves no parts of casts to the backward one, the forward one alone."""
    if candidate.is_hosted or candidate.moved:
        return []
    again = (AGAIN,) * (candidate.policies[0] in BY_STAGE)
    return [(FORWARD, *again, BACKWARD), *[(FORWARD,)] * (not candidate.is_alone)]


def roads_of(
    candidate: Candidate, layers: Layers, split: Split, part: Part | None = None, is_short: bool = False
) -> Mapping[str, Road]:
    """The passes of a micro-batch through the whole model, or a part of it with whole layers, by kind of graph. Where a
    stage is computed again, the backward graph is a forward pass that keeps what its gradients read, and these.
    is_short: as of `Road.of`."""
    all_ = part or Part(1.0, layers.equal, 1.0, candidate.again.count if candidate.again else 0)
    ends, counts = (all_.entry > 0, all_.behind > 0), (round(all_.layers), round(all_.again))
    key = "roads", layers.place(split), candidate.rows, candidate.policies, candidate.adds, ends, counts, is_short
    return layers.kept(key, lambda: _roads_of(candidate, layers, split, ends, counts, is_short))


def _roads_of(
    candidate: Candidate, layers: Layers, split: Split, ends: tuple[bool, bool], counts: tuple[int, int], is_short: bool
) -> Mapping[str, Road]:  # fmt: skip
    """counts: of the layers, and of those that compute more again."""
    policy, more = candidate.policies

    def tracks(recompute: str) -> Mapping[str, Track]:
        machine, all_ = layers.micros.machine, layers.sheets(split, candidate.rows, recompute).sheets
        own = {kind: all_[kind][False] for kind in (FORWARD, BACKWARD)}
        times = {kind: sheet.times(machine, adds=candidate.adds) for kind, sheet in own.items()}
        return {kind: Track.of(kind, sheet, times[kind], machine) for kind, sheet in own.items()}

    def known(recompute: str) -> Mapping[str, Track]:
        key = "tracks", layers.place(split), candidate.rows, recompute, candidate.adds
        return layers.kept(key, lambda: tracks(recompute))

    if policy in BY_STAGE:
        own, inner = known(policy), known(BY_STAGE[policy])
        passes = {FORWARD: own[FORWARD], AGAIN: inner[FORWARD], BACKWARD: inner[BACKWARD]}
        return {kind: Road.of(kind, each, each, *counts, ends, is_short) for kind, each in passes.items()}
    most, some = known(policy), known(more or policy)
    return {kind: Road.of(kind, most[kind], some[kind], *counts, ends, is_short) for kind in most}


@dataclass(frozen=True, slots=True)
class _Asked:
    """whole: the roads of all layers, by which is done once what is done once. roads: those that run, which may be
    without layers that are like others."""

    candidate: Candidate
    whole: Mapping[str, Road]
    roads: Mapping[str, Road]
    net: Net
    copies: Copies | None

    def made(self, once: float) -> WholeStep:
        """once: as of `WholeStep.of`. Raises UnsteadyError if the roads are without layers that are not like others."""
        return self.alone(once) if self.candidate.is_alone else self.in_parts(once)

    def alone(self, once: float) -> WholeStep:
        """A step of one micro-batch is one graph: all that it moves goes under its passes."""
        candidate, begun = self.candidate, 0.0
        moving = Moving(self.net, leaves=candidate.is_hosted, copies=self.copies)
        forward, is_again = list(self._gathers(self.roads, FORWARD)), candidate.gathers_again or candidate.is_hosted
        back = list(self._gathers(self.roads, BACKWARD)) if is_again else []
        # what the last layer reads in both passes comes once
        left = [pair for pair in back if candidate.is_hosted and _unit(pair) == _unit(forward[-1])]
        come = [*forward, *(pair for pair in back if pair not in left)]
        if candidate.is_hosted:  # what is cast lies there twice as long, in fp32
            moving.loads = {one.of: one.bytes_ * (1 + read.is_cast) / candidate.shards for one, read in come}
        if candidate.data > 1:  # and is gathered again, of the part that a rank has
            moving.lasting, left = {one.of._replace(kind=FORWARD) for one, _ in left}, []
        else:
            back = come[len(forward) :]
        both = [*forward, *back]
        if both:
            moving.gather([gather for gather, _ in both], self._made(self.roads, forward, once))
        elif once:
            moving.compute_once(once, sum(read.is_cast for _, read in self.whole[FORWARD].reads()))
            begun = moving.streams.device
        self._sum(moving)
        again = [place for place, _ in self.roads[BACKWARD].reads()] if not is_again else [one.of for one, _ in left]
        keeps = frozenset(place._replace(kind=FORWARD) for place in again)
        moving.run(self.roads[FORWARD], keeps, is_whole=True)
        moving.lose()
        middle, saved = moving.streams.device, moving.level
        moving.run(self.roads[BACKWARD], is_whole=True)
        moving.flush()
        us = {FORWARD: middle - begun, BACKWARD: moving.streams.device - middle}
        return WholeStep(
            us, begun, 0.0, StepPeaks(moving.peak, moving.peak, moving.peak, 0.0, saved), {BOTH: moving.moves}
        )

    def in_parts(self, once: float) -> WholeStep:
        """Run several micro-batches, each a forward and a backward graph, between what is done once."""
        candidate, us, moves = self.candidate, dict[str, float](), dict[str, Moves]()
        first, last, made = self._first(once), self._last(), dict[str, Moving]()
        for kind in (FORWARD, BACKWARD):
            level = made[FORWARD].level if made else 0.0
            moving = made[kind] = Moving(self.net, level=level, copies=self.copies)
            passes = (AGAIN, BACKWARD) if kind == BACKWARD and AGAIN in self.roads else (kind,)
            if candidate.gathers_again:
                moving.gather([gather for each in passes for gather, _ in self._gathers(self.roads, each)], {})
            if kind == BACKWARD:  # what is there from before the first micro-batch goes with the last one
                moving.lend(self._lent())
            if kind == BACKWARD and candidate.zero >= 2 and candidate.data > 1:
                self._sum(moving, is_part=True)
            for each in passes:
                moving.run(self.roads[each])
            moving.flush()
            us[kind], moves[kind] = moving.streams.device, moving.moves
        moves |= {FIRST: first.moves, LAST: last.moves}
        lies_in = 0.0
        if candidate.zero < 2 or candidate.data == 1:  # what micro-batches add to lies in the values of the first
            lies_in = sum(gradient.alive - gradient.bytes_ for _, gradient in self.whole[BACKWARD].gives())
        ends = made[FORWARD].peak + lies_in, made[BACKWARD].peak + lies_in, made[BACKWARD].before + lies_in
        return WholeStep(
            us, first.streams.device, last.streams.device, StepPeaks(*ends, last.peak, made[FORWARD].level), moves
        )

    def _lent(self) -> Iterator[tuple[ParameterPlace, float]]:
        """Bytes of the values that the backward graph reads, or gathers, and that were made before the first
        micro-batch."""
        candidate = self.candidate
        is_split = candidate.zero and candidate.data > 1
        for place, read in self.roads[BACKWARD].reads():
            if candidate.gathers_again:
                yield from [(place._replace(kind=PART), read.bytes_ / candidate.shards)] * read.is_cast
            elif read.is_cast or (is_split and (read.trained or candidate.zero == 3)):
                yield place, read.bytes_

    def _first(self, once: float) -> Moving:
        """What is done before the first micro-batch: casts, and gathers of what no micro-batch gathers."""
        candidate = self.candidate
        gathers = [] if candidate.gathers_again else list(self._gathers(self.whole, FORWARD, BACKWARD))
        if not gathers:
            moving = Moving(self.net)
            moving.streams.compute(once / candidate.shards, 0.0)
            return moving
        return first_of(self.net, [gather for gather, _ in gathers], self._made(self.whole, gathers, once))

    def _last(self) -> Moving:
        """What is done behind the last micro-batch."""
        is_scattered = self.candidate.zero >= 2 and self.candidate.data > 1
        return last_of(self.net, list(self._sums(self.whole[BACKWARD].gives(), over_data=not is_scattered)))

    def _sum(self, moving: Moving, is_part: bool = False) -> None:
        """Gradients are summed in the backward graph. is_part: as of `sums_of`."""
        sums = list(self._sums(self.roads[BACKWARD].gives(), over_data=True, is_part=is_part))
        chains = ((first.of, sum(each.bytes_ for each in first.chain())) for first in sums)
        moving.sum(sums, left_out=_left_out(self.roads[BACKWARD], chains))

    def _gathers(
        self, roads: Mapping[str, Road], *kinds: str
    ) -> Iterator[tuple[Gather[ParameterPlace], ParameterRead]]:
        """What graphs gather of the parameters that ZeRO splits, each value once; or what comes from the host."""
        candidate, seen = self.candidate, set[tuple[int, str]]()
        if (not candidate.zero or candidate.data == 1) and not candidate.is_hosted:
            return
        for kind in kinds:
            for place, read in roads[kind].reads():
                one = place[1:]
                if (read.trained or candidate.zero == 3 or candidate.is_hosted) and one not in seen:
                    seen.add(one)
                    layer = kind, place.layer, read.unit if place.layer == OUTSIDE else ""
                    yield Gather(place, layer, SHARDS, read.dtype, read.bytes_, candidate.data == 1), read

    def _made(
        self, roads: Mapping[str, Road], gathers: Iterable[tuple[Gather[ParameterPlace], ParameterRead]], once: float
    ) -> dict[ParameterPlace, float]:
        """us of each cast, of a rank's part. once: of all of the model, of whole parameters."""
        casts = {gather.of: read.bytes_ for gather, read in gathers if read.is_cast}
        all_ = sum(casts.values()) + _left_out(roads[FORWARD], casts.items())
        return {place: once / self.candidate.shards * bytes_ / all_ for place, bytes_ in casts.items()}

    def _sums(
        self, gradients: Iterable[tuple[ParameterPlace, Gradient]], over_data: bool, is_part: bool = False
    ) -> Iterator[Sum[ParameterPlace]]:
        chain = sums_of(self.candidate, over_data, is_part)
        for place, one in gradients:
            yield from chain(place, one.bytes_, one.dtype, one.over)


def _left_out(road: Road, values: Iterable[tuple[ParameterPlace, float]]) -> float:
    """Bytes of what a road is without. values: what it has."""
    of_layer = defaultdict[int, float](float)
    for place, bytes_ in values:
        of_layer[place.layer] += bytes_
    return sum(each.layers * of_layer[each.like] for each in road.left_out)


def _unit(gathered: tuple[Gather[ParameterPlace], ParameterRead]) -> tuple[int, str]:
    """The layer for which a parameter comes."""
    gather, read = gathered
    return gather.of.layer, read.unit if gather.of.layer == OUTSIDE else ""
