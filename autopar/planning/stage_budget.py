"""How many layers of each stage of a pipeline are computed again: as few as let its rank fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from autopar.machines import Machine
from autopar.planning.candidates import Candidate
from autopar.planning.deal import Ranges
from autopar.planning.layers import Layers
from autopar.planning.moments import COLUMNS, LATE, SAVED
from autopar.planning.pipelined import Pipelined, cost_of, pipelined
from autopar.planning.predict import Prediction, predict
from autopar.planning.rank_memory import held_of, rank_bytes

ROUNDS = 12  # cuts that are looked at until each rank has as few layers as it needs
CLOSE = 1e-6  # of a layer: where a stage begins this near to it, it begins with it
Counts = tuple[int, ...]  # by stage


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


class Trials:
    """Numbers of layers of two policies that are tried. mix: a plan with these, its layers are not decided."""

    def __init__(self, mix: Candidate, layers: Layers, machine: Machine, limit: float) -> None:
        self.mix, self.layers, self.machine, self.limit = mix, layers, machine, limit

    def fewest(self, slowest: float = math.inf) -> Prediction:
        """The plan with the fewest layers of each rank that leave at most `limit` bytes there; where none is so small,
        the least of those that were looked at. slowest: us from which on nobody asks for it.

        Layers that compute more again take longer, so the cut moves, and ranks need other numbers of layers: each round
        tries what every rank needs by the cut of the one before.
        """
        tried = list(self._rounds(slowest))
        fitting = [each for each in tried if each.most <= self.limit]
        if not fitting:
            return self._predicted(min(tried, key=lambda each: each.most))
        return min((self._without_more(each) for each in fitting), key=lambda made: made.total)

    def tried(self, counts: Counts, starts: Counts) -> Tried:
        """counts: of the first layers of each stage, where stages begin with the layers `starts`."""
        assert self.mix.again is not None
        ranges = _joined((start, start + count) for start, count in zip(starts, counts, strict=False) if count)
        candidate = self.mix._replace(again=replace(self.mix.again, ranges=ranges))
        made = pipelined(candidate, self.layers)
        bytes_ = [rank_bytes(candidate, made, rank) for rank in range(candidate.pp)]
        return Tried(candidate, made, counts, _starts(made), bytes_)

    def _rounds(self, slowest: float) -> Iterator[Tried]:
        stages = self.mix.pp * self.mix.chunks
        now, seen = self.tried((0,) * stages, (0,) * stages), set[tuple[Counts, Counts]]()
        while len(seen) < ROUNDS and (now.counts, now.starts) not in seen:
            yield now
            seen.add((now.counts, now.starts))
            if now.least_us >= slowest:
                return
            now = self.tried(self._needed(now), now.starts)

    def _needed(self, now: Tried) -> Counts:
        """The layers of each stage that let its rank fit, by what they leave at its fullest moment."""
        counts = [min(count, end - begin) for count, (begin, end) in zip(now.counts, pairwise(now.starts), strict=True)]
        for rank, bytes_ in enumerate(now.bytes_):
            self._change(counts, now, rank, bytes_ - self.limit)
        return tuple(counts)

    def _change(self, counts: list[int], now: Tried, rank: int, over: float) -> None:
        """Give the stages of a rank as many layers more as make up for `over` bytes, or take away as many as there is
        room for. The first stages hold the most micro-batches, so that a layer of theirs leaves most."""
        moments = now.made.moments[rank]
        row = moments.fullest(held_of(now.candidate, now.made, rank))
        rooms = [now.starts[stage + 1] - now.starts[stage] for stage in moments.stages]
        savings = [row[i] @ self._saved for i in range(len(moments.stages))]
        order = sorted(range(len(rooms)), key=lambda i: savings[i], reverse=over > 0)
        for i in order:
            stage, saving = moments.stages[i], savings[i]
            if saving <= 0:
                continue
            wanted = math.ceil(over / saving)
            changed = min(max(wanted, -counts[stage]), rooms[i] - counts[stage])
            counts[stage] += changed
            over -= changed * saving

    @cached_property
    def _saved(self) -> np.ndarray:
        """Bytes that a layer leaves if it computes more again, of each of what moments count."""
        assert self.mix.again is not None
        cost = cost_of(self.mix._replace(again=replace(self.mix.again, ranges=((0, 1),))), self.layers)
        assert cost.again is not None
        saved, late = (
            sum(getattr(cost, name).each - getattr(cost.again, name).each for name in names)
            for names in (("saved",), ("late", "made"))
        )
        found = np.zeros(COLUMNS)
        found[SAVED], found[LATE] = saved, late
        return found

    def _without_more(self, now: Tried) -> Prediction:
        """The fastest of a plan that fits and of those that fit too with fewer layers of some stages."""
        best = self._predicted(now)
        for stage in range(len(now.counts)):
            while now.counts[stage]:
                counts = tuple(count - (i == stage) for i, count in enumerate(now.counts))
                less = self.tried(counts, now.starts)
                if less.most > self.limit or self._predicted(less).total >= best.total:
                    break
                now, best = less, self._predicted(less)
        return best

    def _predicted(self, tried: Tried) -> Prediction:
        return predict(tried.candidate, self.layers, self.machine)


def _starts(made: Pipelined) -> Counts:
    """The first layer that begins in each stage, and the number of all layers."""
    ends = accumulate(stage.share.time.layers for stage in made.stages)
    return (0, *(math.ceil(end - CLOSE) for end in ends))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges of layers in their order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)
