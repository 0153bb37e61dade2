"""How many layers of each stage of a pipeline are computed again: as few as let its rank fit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import numpy as np

from autopar.machines import Machine
from autopar.planning.price.cost import Cost
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import CLOSE, COLUMNS, LATE, SAVED, Pipelined, cost_of, pipelined
from autopar.planning.price.predict import Prediction, held_of, predict, rank_bytes
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.deal import Ranges

SURE = 0.5  # of the layers that ranks lack: stages that take longer get fewer
ROUNDS = 12  # cuts that are looked at until all ranks fit
NEAR = 1.01  # times the time of a plan that is shown: what is slower is not improved
CLOSELY = 0.02  # of the memory of all ranks: what holds so much too much is improved too
STEPS, TRIES = 12, 8  # at most, to improve a plan, and plans that are looked at for each
Counts = tuple[int, ...]  # by stage
Key = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A plan with some numbers of layers. counts: how many of each stage compute more again, the first ones that begin
    in it by an earlier cut. starts: the layers that stages begin with by its own cut, and the number of all. bytes_: of
    each rank."""

    candidate: Candidate
    made: Pipelined
    counts: Counts
    starts: Counts
    bytes_: Sequence[float]

    @property
    def most(self) -> float:
        return max(self.bytes_)

    @property
    def least_us(self) -> float:
        """us of the micro-batches of the slowest rank."""
        return self.candidate.microbatches * max(rank.micro_us for rank in self.made.ranks)

    def has_room(self, stage: int) -> bool:
        """True if there are layers of a stage that do not compute more again."""
        return self.counts[stage] < self.starts[stage + 1] - self.starts[stage]


class Trials:
    """Numbers of layers of two policies that are tried. mix: a plan with these, its layers are not decided."""

    def __init__(self, mix: Candidate, layers: Layers, machine: Machine, limit: float) -> None:
        self.mix, self.layers, self.machine, self.limit = mix, layers, machine, limit

    def fewest(self, slowest: float = math.inf, is_last: bool = True) -> Prediction:
        """The fastest plan that leaves at most `limit` bytes on each rank; where none is found, that which has least
        too much. slowest: us from which on nobody asks for it. is_last: False if it is improved later, where it is not
        known yet what that is.

        Layers that compute more again take longer, so the cut moves, and ranks need other numbers of layers. So ranks
        that hold too much get half of what they lack by the cut of the round before, until all fit; then layers go and
        move one by one while that makes a better plan. Ranks with several stages get them of the stage that leaves most
        by a layer, or as many of each: the better of both is improved.
        """
        begun = [list(self._rounds(slowest, is_even))[-1] for is_even in (False, True)[: min(self.mix.chunks, 2)]]
        key, _, best = min((self._key(now, slowest), i, now) for i, now in enumerate(begun))
        if is_last if math.isinf(slowest) else key < (CLOSELY * self.limit, NEAR * slowest):
            best = self._improved(best, key, slowest)
        made = predict(best.candidate, self.layers, self.machine, slowest, self.limit)
        return replace(made, memory=best.most)

    def tried(self, counts: Counts, starts: Counts) -> Tried:
        """counts: of the first layers of each stage, where stages begin with the layers `starts`."""
        assert self.mix.again is not None
        counts = tuple(min(count, end - begin) for count, (begin, end) in zip(counts, pairwise(starts), strict=True))
        ranges = _joined((start, start + count) for start, count in zip(starts, counts, strict=False) if count)
        candidate = self.mix._replace(again=replace(self.mix.again, ranges=ranges))
        made = pipelined(candidate, self.layers)
        bytes_ = [rank_bytes(candidate, made, rank) for rank in range(candidate.pp)]
        return Tried(candidate, made, counts, _starts(made), bytes_)

    def _rounds(self, slowest: float, is_even: bool) -> Iterator[Tried]:
        stages = self.mix.pp * self.mix.chunks
        now, seen = self.tried((0,) * stages, (0,) * (stages + 1)), set[tuple[Counts, Counts]]()
        while (now.counts, now.starts) not in seen and len(seen) < ROUNDS:
            yield now
            if now.most <= self.limit or now.least_us + self._lacking_us(now) >= slowest:
                return
            seen.add((now.counts, now.starts))
            now = self.tried(self._more(now, is_even), now.starts)

    def _lacking_us(self, now: Tried) -> float:
        """us by which a step is longer if ranks get most of the layers that they lack, shared by all ranks."""
        lacking = 0.0
        for rank, bytes_ in enumerate(now.bytes_):
            if bytes_ > self.limit:
                saving = max(self._savings(now, rank).values())
                lacking += SURE * (bytes_ - self.limit) / saving if saving > 0 else 0.0
        return now.candidate.microbatches * lacking * self._longer / now.candidate.pp

    def _more(self, now: Tried, is_even: bool) -> Counts:
        """The layers of each stage, with half of what ranks lack that hold too much."""
        counts = list(now.counts)
        for rank, bytes_ in enumerate(now.bytes_):
            if bytes_ > self.limit:
                self._add(counts, now, rank, bytes_ - self.limit, is_even)
        return tuple(counts)

    def _add(self, counts: list[int], now: Tried, rank: int, over: float, is_even: bool) -> None:
        """Half of the layers that make up for so many bytes at the fullest moment, of stages that have some left. If
        none leaves anything then, one layer: stages that take longer get less of the model."""
        savings = self._savings(now, rank)
        open_ = [stage for stage in savings if now.has_room(stage)]
        stages = open_ if is_even else sorted(open_, key=lambda stage: -savings[stage])[:1]
        each = sum(max(0.0, savings[stage]) for stage in stages)
        for stage in stages:
            counts[stage] += math.ceil(over / each / 2) if each > 0 else 1

    @cached_property
    def _costs(self) -> tuple[Cost, Cost]:
        """The costs of both policies."""
        assert self.mix.again is not None
        cost = cost_of(self.mix._replace(again=replace(self.mix.again, ranges=((0, 1),))), self.layers)
        assert cost.again is not None
        return cost, cost.again

    @cached_property
    def _longer(self) -> float:
        """us that a layer takes longer if it computes more again."""
        less, more = (cost.forward.each + cost.backward.each for cost in self._costs)
        return max(0.0, more - less)

    @cached_property
    def _saved(self) -> np.ndarray:
        """Bytes that a layer leaves if it computes more again, of each of what moments count."""
        less, more = self._costs
        saved, late = (
            sum(getattr(less, name).each - getattr(more, name).each for name in names)
            for names in (("saved",), ("late", "made"))
        )
        found = np.zeros(COLUMNS)
        found[SAVED], found[LATE] = saved, late
        return found

    def _improved(self, now: Tried, key: Key, slowest: float) -> Tried:
        """The best plan that is reached from one by steps to better ones; those are tried that promise most."""
        for _ in range(STEPS):
            savings = dict(pair for rank in range(self.mix.pp) for pair in self._savings(now, rank).items())
            promising = heapq.nsmallest(TRIES, self._near(now), key=partial(self._promise, now, savings))
            near = [self.tried(counts, now.starts) for counts in promising]
            keys = [self._key(each, slowest) for each in near]
            best = min(range(len(near)), key=lambda i: keys[i], default=-1)
            if best < 0 or keys[best] >= key:
                break
            now, key = near[best], keys[best]
        return now

    def _promise(self, now: Tried, savings: Mapping[int, float], counts: Counts) -> tuple[float, float, float]:
        """What numbers of layers promise if the cut stays near; less is better: bytes that are too many; layers that
        compute more again; us of the slowest rank."""
        bytes_, us = list(now.bytes_), [rank.micro_us for rank in now.made.ranks]
        for stage, rank in enumerate(now.made.schedule.ranks):
            more = counts[stage] - now.counts[stage]
            bytes_[rank] -= more * savings[stage] * (SURE if more < 0 else 1.0)
            us[rank] += more * self._longer
        return sum(max(0.0, each - self.limit) for each in bytes_), sum(counts), max(us)

    def _savings(self, now: Tried, rank: int) -> dict[int, float]:
        """Bytes that a layer leaves at the fullest moment of a rank if it computes more again, by its stages."""
        moments = now.made.moments[rank]
        row = moments.fullest(held_of(now.candidate, now.made, rank), now.made.ranks[rank].cost.message.bytes_)
        return {stage: float(counted @ self._saved) for stage, counted in zip(moments.stages, row, strict=True)}

    def _near(self, now: Tried) -> Iterator[Counts]:
        """With a layer less or more of one stage, or one that moves between stages of a rank or to the stage beside."""
        rank_of = now.made.schedule.ranks
        for i, count in enumerate(now.counts):
            if count:
                yield _moved(now.counts, i, -1)
                yield from (
                    _moved(_moved(now.counts, i, -1), j, 1)
                    for j in range(len(now.counts))
                    if j != i and (rank_of[i] == rank_of[j] or abs(i - j) == 1) and now.has_room(j)
                )
            if now.has_room(i) and now.most > self.limit:
                yield _moved(now.counts, i, 1)

    def _key(self, tried: Tried, slowest: float) -> Key:
        """Less is better: the bytes that ranks hold too much, then us."""
        over = sum(max(0.0, bytes_ - self.limit) for bytes_ in tried.bytes_)
        if over or tried.least_us >= NEAR * slowest:
            return over, math.inf
        return over, predict(tried.candidate, self.layers, self.machine).total


def _moved(counts: Counts, stage: int, by: int) -> Counts:
    return (*counts[:stage], counts[stage] + by, *counts[stage + 1 :])


def _starts(made: Pipelined) -> Counts:
    """The first layer that begins in each stage, and the number of all layers."""
    ends = accumulate(stage.share.time.layers for stage in made.stages)
    return (0, *(math.ceil(end - CLOSE) for end in ends))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges of layers in their order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)
