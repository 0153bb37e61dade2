"""Find the fastest plan that fits: candidates in the order of a bound, simulated until no other one can be better."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import AutoparError, first_sentence
from autopar.machines import Machine
from autopar.planning.budget import with_fewest
from autopar.planning.candidates import Candidate
from autopar.planning.cost import Cost
from autopar.planning.data_time import least_data_us
from autopar.planning.layers import Layers
from autopar.planning.micro import HIGH
from autopar.planning.predict import Prediction, predict
from autopar.planning.split import Split
from autopar.planning.states import MOMENTS

LEAST_FORWARD = 0.25  # of a micro-batch's time: backward products are twice the forward ones, and attention's 2.5
SAME = "the same without recomputation"  # what became of candidates that need compute no layer again
FITS = 0.92  # of a device's memory: the rest is the allocator's, the libraries' and the driver's


@dataclass(frozen=True, slots=True)
class Work:
    """What every plan has to do. flops: of the products of a step, as the model asks for them; least: without what the
    mask of causal attention hides. parameters: their bytes. dtype: of most products."""

    flops: float
    least: float
    parameters: float
    dtype: str


@dataclass(slots=True)
class Found:
    """best: plans that fit, the fastest first. least: the one that takes least memory. tried: all whose whole time is
    known. counts: of candidates, by what became of them: "simulated", "larger than the memory", "slower by a bound",
    "larger by a bound", SAME, or the first sentence of what refused them."""

    best: list[Prediction] = field(default_factory=list)
    least: Prediction | None = None
    tried: list[Prediction] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def certificate(self) -> str:
        """How many candidates there were, and what became of them."""
        parts = ", ".join(f"{count} {what}" for what, count in self.counts.most_common())
        return f"{sum(self.counts.values())} candidates: {parts}"


def search(
    candidates: Iterable[Candidate], layers: Layers, work: Work, machine: Machine, limit: float, top: int,
    equal: int, tell: Callable[[int, int], None] = lambda done, all_: None,
) -> Found:  # fmt: skip
    """The `top` fastest candidates whose memory is at most `limit` bytes. equal: layers of the model that are equal.

    Those come first whose bound is lowest. Each has several (`Bounds.steps`), of which the next one is looked at when
    no other candidate has a lower one: the first costs nothing, the last a program for each number of rows. When the
    lowest bound is above the time of the last of `top`, no other can be among them. tell: of progress, (done, all).
    """
    found, bounds, known = Found(), Bounds(layers, work, machine, equal), list(candidates)
    queue = [(bounds.products(candidate), i, 1) for i, candidate in enumerate(known)]
    heapq.heapify(queue)
    total = len(queue)
    while queue:
        bound, i, step = heapq.heappop(queue)
        tell(total - len(queue), total)
        slowest = found.best[-1].total if len(found.best) >= top else math.inf
        if bound >= slowest:
            found.counts["slower by a bound"] += len(queue) + 1
            break
        try:
            if step == 1 and bounds.memory(known[i]) > limit:
                found.counts["larger by a bound"] += 1
            elif step < len(bounds.steps):
                heapq.heappush(queue, (max(bound, bounds.steps[step](known[i])), i, step + 1))
            else:
                _try(known[i], found, layers, machine, limit, top, equal, slowest)
        except AutoparError as error:
            found.counts[f"refused ({first_sentence(str(error))})"] += 1
    if not found.best and found.least is None and known:
        small = min(known, key=bounds.memory)
        with suppress(AutoparError):  # it is counted already
            decided = with_fewest(small, layers, machine, limit)
            found.least = None if decided is None else predict(decided, layers, machine)
    return found


def _try(
    candidate: Candidate, found: Found, layers: Layers, machine: Machine, limit: float, top: int, equal: int,
    slowest: float,
) -> None:  # fmt: skip
    decided = with_fewest(candidate, layers, machine, limit)
    if decided is None:
        found.counts[SAME] += 1
        return
    made = predict(decided, layers, machine, slowest, limit)
    if candidate.pp == 1 or (made.total < slowest and made.memory <= limit):  # of others no pipeline was simulated
        found.tried.append(made)
    if found.least is None or made.memory < found.least.memory:
        found.least = made
    if made.memory > limit:
        found.counts["larger than the memory"] += 1
        return
    found.counts["simulated"] += 1
    found.best = sorted([*found.best, made], key=lambda each: each.total)[:top]


class Bounds:
    """What no plan falls below. equal: layers of the model that are equal."""

    def __init__(self, layers: Layers, work: Work, machine: Machine, equal: int) -> None:
        self.layers, self.work, self.machine, self.equal = layers, work, machine, equal
        self.rising = machine.rising()
        flops = machine.device.flops
        best = max(share for _, share in machine.device.products.points)
        self._alone_us = work.least / (flops.get(work.dtype, flops["float32"]) * best) * 1e6
        self._data: dict[Hashable, float] = {}

    def products(self, candidate: Candidate) -> float:
        """us of the products of a step at the best share of the peak that the machine reaches."""
        return self._alone_us / (candidate.data * candidate.tp * candidate.pp) * _filling(candidate)

    def rows(self, candidate: Candidate) -> float:
        """us of the calls of a step, as if each rank of cp had its part of every call of many whole rows, nothing was
        computed again and collectives were hidden as well as can be; and of its data axes."""
        return self._least(candidate, Split(candidate.tp, candidate.sequence), max(HIGH, candidate.rows))

    def parts(self, candidate: Candidate) -> float:
        """The same of the program that is made for so many ranks of cp. What cp divides has few rows."""
        if candidate.cp == 1:
            return 0.0
        low = self.layers.micros.low
        return self._least(candidate, candidate.split.near, low if candidate.rows == low else max(HIGH, candidate.rows))

    def _least(self, candidate: Candidate, of: Split, rows: int) -> float:
        """By a program of so many rows, on the ranks `of` a split with as many of cp or with one."""
        share = candidate.rows / rows * of.cp / candidate.cp
        forward, backward = self.layers.least_us(candidate.split, of, rows, share)
        return self._step(candidate, forward + backward, forward / (forward + backward))

    def calls(self, candidate: Candidate) -> float:
        """us of the calls of a step, as if pp divided them without a rest and nothing was computed again."""
        cost = self.layers.cost(candidate.split, candidate.rows, "none")
        micro_us = cost.forward(self.equal) + cost.backward(self.equal)
        return self._step(candidate, micro_us, cost.forward(self.equal) / micro_us)

    def _step(self, candidate: Candidate, micro_us: float, forward: float) -> float:
        busy = candidate.microbatches * micro_us / candidate.pp * _filling(candidate, forward)
        return busy + self._data_us(candidate)

    def _data_us(self, candidate: Candidate) -> float:
        key = candidate.axes, candidate.zero, candidate.gathers_again, candidate.microbatches
        if key not in self._data:
            self._data[key] = least_data_us(candidate, self._whole, self.equal, self.rising)
        return self._data[key]

    @property
    def steps(self) -> tuple[Callable[[Candidate], float], ...]:
        """One after the other, each takes more to know than the one before."""
        return self.products, self.rows, self.parts, self.calls

    def memory(self, candidate: Candidate) -> float:
        """Bytes of a rank's part of parameters, states, and of gradients or what a micro-batch keeps at least."""
        part = self.work.parameters / candidate.tp / candidate.pp
        stored = (1 + MOMENTS) * part / candidate.shards
        gradients = part / (candidate.shards if candidate.zero >= 2 else 1)
        ranks = candidate.tp * candidate.pp * candidate.cp
        saved = self._whole.saved.each * self.equal * candidate.rows / self.layers.micros.low
        return stored + max(gradients, saved / ranks)

    @cached_property
    def _whole(self) -> Cost:
        """Of the fewest rows on one rank that keeps as little as it can."""
        return self.layers.cost(Split(), self.layers.micros.low, "full")


def _filling(candidate: Candidate, forward: float = LEAST_FORWARD) -> float:
    """How much longer a pipeline takes at least that fills and empties. forward: the part of a micro-batch's time that
    its forward pass takes. 1F1B: (m + (p - 1) / v) / m. Where gradients of weights fill the bubble, ranks begin one
    after the other: the mean of them waits for the forward passes of half of the stages before the last one.
    """
    waits = forward / 2 if candidate.halves else 1.0
    return 1 + waits * (candidate.pp - 1) / candidate.chunks / candidate.microbatches
