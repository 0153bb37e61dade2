"""Find the fastest plan that fits: candidates in the order of a bound, simulated until no other one can be better."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, groupby
from operator import attrgetter

from autopar.errors import AutoparError, first_sentence
from autopar.machines import Machine
from autopar.planning.bounds import Bounds, LeastWork
from autopar.planning.layer_budget import improved, with_fewest
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import least_us, pipelined
from autopar.planning.price.predict import Prediction, most_bytes, predict
from autopar.planning.space.axis_orders import ORDER
from autopar.planning.space.candidates import (
    ACTIVATIONS,
    ALONE,
    BY_STAGE,
    IN_FILES,
    LAYERS,
    OFFLOAD,
    STATES,
    TOGETHER,
    Candidate,
    Space,
)

SMALL = 4  # candidates that are tried for the least memory, where a bound says that none fits
Alike = tuple[Candidate, ...]
SHARED = 3  # the first step before which plans with ulysses stand with those that have as many ranks of cp
SIZES = ("dp", "fsdp", "cp", "ulysses", "tp", "pp", "order", "rows", "microbatches", "schedule", "chunks")
OWN = ("recompute", "again")  # fields that no bound reads before that of what is computed again
# By step of `Bounds.steps`: what candidates that it cannot tell apart have in common, from this step on, beside what
# those of the step before have.
ALIKE: Mapping[int, Callable[[Candidate], Hashable]] = {
    0: attrgetter(*SIZES),
    1: attrgetter("sequence"),
    2: attrgetter(*(name for name in Candidate._fields if name not in (*SIZES, *OWN))),
    4: lambda candidate: candidate,
}
BY_MEMORY = 7  # the first step whose bound of the time reads what memory allows
REFINED = 8  # the fastest pipelines that compute all layers again: it is tried if a part of these is enough
SAME = "the same without recomputation"  # what became of candidates that need compute no layer again
HOST = "the host's memory"
HOST_LARGER, DISK_LARGER = f"larger than {HOST}", "larger than the disk"
FITS = 0.92  # of a device's memory: the rest is the allocator's, the libraries' and the driver's


@dataclass(slots=True)
class FoundPlans:
    """best: plans that fit, the fastest first (`_one_of_each`). least: where none does, the one that takes least
    memory. tried: all whose whole time is known. counts: of candidates, by what became of them: "simulated", "larger
    than the memory", "slower by a bound", "larger by a bound", SAME, or the first sentence of what refused them.
    refined: pipelines beside them that were tried with a part of their layers computed again. hosted: what came of
    plans with states, or parameters, in the host's memory. again: what came of plans that compute stages again. near:
    all candidates but those that a bound says to be slower, whatever of them waits in the host's memory."""

    best: list[Prediction] = field(default_factory=list)
    least: Prediction | None = None
    tried: list[Prediction] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refined: int = 0
    hosted: str = ""
    again: str = ""
    near: Sequence[Candidate] = ()
    least_host: Prediction | None = None  # of those that are larger than the host's memory, or the disk

    @property
    def certificate(self) -> str:
        """How many candidates there were, and what became of them."""
        parts = ", ".join(f"{count} {what}" for what, count in self.counts.most_common())
        more = f"; {self.refined} pipelines tried with a part of their layers computed again" if self.refined else ""
        notes = "".join(f"; {note}" for note in (self.again, self.hosted) if note)
        return f"{sum(self.counts.values())} candidates: {parts}{more}{notes}"


def search(
    space: Space, layers: Layers, work: LeastWork, machine: Machine, limit: float, top: int,
    tell: Callable[[int, int], None] = lambda done, all_: None, known: Sequence[Prediction] = (),
) -> FoundPlans:  # fmt: skip
    """The `top` fastest plans of a space whose memory is at most `limit` bytes.

    Those come first whose bound is lowest. Each has several (`Bounds.steps`), of which the next one is looked at when
    no other candidate has a lower one: the first costs nothing, the last its own programs. Candidates that a bound
    cannot tell apart (`ALIKE`) have it together. When the lowest bound is above the time of the last of `top`, no other
    can be among them. tell: of progress, (done, all).
    known: plans beside those of the space.

    A plan with ulysses is none of its own until its bound differs from that with as many ranks of cp (`SHARED`).
    """

    def plans(alike: Alike, done: int) -> int:
        return len(alike) * (1 + len(space.parts(alike[0])) * (done < SHARED))

    found_plans, bounds = FoundPlans(list(known)), Bounds(layers, work, machine, space.model.layers)
    bounds.limit = limit
    memories, steps, last = bounds.memories, bounds.steps, len(bounds.steps) - 1
    drawn = [tuple(alike) for _, alike in groupby(space.drawn(), ALIKE[0])]
    queue = [(bounds.products(alike[0]), i, 1, alike) for i, alike in enumerate(drawn)]
    later: list[tuple[float, int, int, Alike]] = []  # plans with ulysses: the others say what they must be better than
    total = sum(plans(alike, 0) for alike in drawn)
    number = count(len(queue))  # of what has the same bound, what was there before comes first
    larger, near = list[Candidate](), _Near()
    heapq.heapify(queue)
    while queue or later:
        if not queue:
            queue, later = later, []
            heapq.heapify(queue)
        bound, _, step, alike = heapq.heappop(queue)
        slowest = bounds.slowest = found_plans.best[-1].total if len(found_plans.best) >= top else math.inf
        if bound >= slowest:
            queue, slower = [], [(bound, 0, step, alike), *queue]
            found_plans.counts["slower by a bound"] += sum(plans(each, at - 1) for _, _, at, each in slower)
            near.keep(each for _, _, at, each in slower if at > BY_MEMORY and each[0].again is not None)
            continue
        for shared in zip(*map(space.shared, alike), strict=True) if step == SHARED else ():
            later.append((bound, next(number), step + 1, shared))
            near.origins.update(zip(shared, alike, strict=True))
        for each in _parts(alike, step):
            try:
                if step in memories and all(memories[step](one) > limit for one in reversed(each)):
                    found_plans.counts["larger by a bound"] += plans(each, step)
                elif step == last and bounds.is_larger(each[0], limit):
                    larger += each
                    found_plans.counts["larger by a bound"] += plans(each, step)
                elif step <= last:
                    more = max(bound, steps[step](each[0]))
                    heapq.heappush(queue, (more, next(number), step + 1, each))
                    continue
                else:
                    _try(each[0], found_plans, bounds, limit, top, slowest)
            except AutoparError as error:
                found_plans.counts[f"refused ({first_sentence(str(error))})"] += plans(each, step)
            near.keep([each])
            tell(found_plans.counts.total(), total)
    found_plans.near = near.of(drawn)
    _refine(found_plans, space, layers, machine, limit, top)
    if not found_plans.best:
        every = [] if found_plans.least else chain.from_iterable(drawn)
        larger.sort(key=lambda each: (bounds.held(each), _places(each)))
        smallest = [*larger[:SMALL], *heapq.nsmallest(SMALL, every, bounds.memory)]
        for small in smallest:
            with suppress(AutoparError):  # it is counted already
                decided = with_fewest(small, layers, machine, limit)
                if decided is not None:
                    _keep_least(found_plans, predict(decided, layers, machine))
    return found_plans


class _Near:
    """Candidates that are left out by no bound of time that also holds with states or activations in the host's memory:
    there a step takes no less, and what memory allows is another thing. origins: by those with ulysses, the drawn ones
    that they are made of."""

    def __init__(self) -> None:
        self.origins: dict[Candidate, Candidate] = {}
        self.found: dict[Hashable, set[Candidate]] = defaultdict(set)

    def keep(self, near: Iterable[Alike]) -> None:
        for alike in near:
            own = [self.origins[one] for one in alike] if alike[0] in self.origins else alike
            self.found[ALIKE[0](own[0])].update(own)

    def of(self, drawn: Iterable[Alike]) -> list[Candidate]:
        """Choose these of groups, in the order of those."""
        kept = ((alike, self.found[key]) for alike in drawn if (key := ALIKE[0](alike[0])) in self.found)
        return [one for alike, own in kept for one in alike if one in own]


def with_stages(
    found_plans: FoundPlans, space: Space, layers: Layers, work: LeastWork, machine: Machine, limit: float, top: int
) -> FoundPlans:  # fmt: skip
    """What was found. Where nothing fits of a model of which all micro-batches come forward before the first goes back:
    plans that keep of each what enters its stage, and compute the rest again."""
    if found_plans.best or not space.model.waits or "recompute" in space.fixed:
        return found_plans
    for policy in BY_STAGE:
        there = replace(space, fixed={**space.fixed, "recompute": policy})
        searched = search(there, layers, work, machine, limit, top)
        found_plans.best, found_plans.again = searched.best, "nothing fits but where stages are computed again"
        found_plans.tried += searched.tried
        found_plans.counts += searched.counts
        if searched.least is not None:
            _keep_least(found_plans, searched.least)
        if found_plans.best:
            return found_plans
    found_plans.again = "nothing fits where stages are computed again either"
    return found_plans


def with_host(
    found_plans: FoundPlans, space: Space, layers: Layers, work: LeastWork, machine: Machine, limit: float, top: int
) -> FoundPlans:  # fmt: skip
    """What was found, with plans that have states or activations in the host's memory, or parameters and all where
    nothing fits without; both where that is not enough, then files of the disk. Where something fits, of the first two
    the fastest one is taken that is faster."""
    near, found_plans.near = found_plans.near, ()  # nobody else asks
    if not machine.host_memory or OFFLOAD in space.fixed:
        return found_plans
    is_open = "recompute" not in space.fixed  # `memory=` decides what is computed again
    if found_plans.best:
        for waits in (STATES, *(ACTIVATIONS,) * is_open):
            there = replace(space, fixed={**space.fixed, OFFLOAD: waits}, among=near)
            (first,) = search(there, layers, work, machine, limit, 1, known=found_plans.best[:1]).best
            if first is not found_plans.best[0]:
                found_plans.tried.append(first)
                found_plans.best = [first, *found_plans.best][:top]
        return found_plans
    searched = list[FoundPlans]()
    for tier in (ALONE, TOGETHER, IN_FILES if machine.disk_folder else ()):
        for waits in (each for each in tier if is_open or ACTIVATIONS not in each):
            there = replace(space, fixed={**space.fixed, OFFLOAD: waits})
            searched.append(search(there, layers, work, machine, limit, top))
            found_plans.hosted = f"nothing fits without {'the disk' if tier is IN_FILES else HOST}"
        found_plans.best = _one_of_each(made for each in searched for made in each.best)[:top]
        if found_plans.best:
            break
    for each in searched:
        found_plans.tried += each.tried
        found_plans.counts += each.counts
        if each.least is not None and not found_plans.best:
            _keep_least(found_plans, each.least)
    lacking = [each.least_host for each in searched if each.least_host is not None]
    found_plans.least_host = min(lacking, key=lambda made: (not made.candidate.folder, made.host), default=None)
    return found_plans


def _refine(found_plans: FoundPlans, space: Space, layers: Layers, machine: Machine, limit: float, top: int) -> None:
    """Let of the fastest pipelines that compute all layers again as few do so as fit; and where a plan was found
    before it was known how fast others are, look again for the best layers."""
    found_plans.best = _one_of_each(improved(made, layers, machine, limit) for made in found_plans.best)
    again, is_open = space.model.again, "recompute" not in space.fixed
    uniform = [
        made
        for made in found_plans.tried
        if made.candidate.pp > 1 and made.candidate.recompute in ("selective", "full") and not made.candidate.is_hosted
    ]
    for made in sorted(uniform, key=lambda made: made.total)[: REFINED * bool(again and is_open and found_plans.best)]:
        slowest = found_plans.best[-1].total if len(found_plans.best) >= top else math.inf
        mix = made.candidate._replace(recompute=LAYERS, again=again)
        with suppress(AutoparError):  # of a program that no candidate asked for
            decided = with_fewest(mix, layers, machine, limit, min(slowest, made.total))
            if decided is not None and decided.ranges:
                found_plans.refined += 1
                other = predict(decided, layers, machine)
                if other.memory <= limit and other.total < made.total:
                    found_plans.tried.append(other)
                    found_plans.best = _one_of_each([*found_plans.best, other])[:top]


def _parts(alike: Alike, step: int) -> Iterator[Alike]:
    """Group the candidates that a step cannot tell apart."""
    if step not in ALIKE or len(alike) == 1:
        yield alike
        return
    candidates: dict[Hashable, list[Candidate]] = {}
    for one in alike:
        candidates.setdefault(ALIKE[step](one), []).append(one)
    yield from map(tuple, candidates.values())


def _try(
    candidate: Candidate, found_plans: FoundPlans, bounds: Bounds, limit: float, top: int, slowest: float
) -> None:  # fmt: skip
    layers, machine = bounds.layers, bounds.machine
    least = partial(bounds.of_mix, candidate)
    decided = with_fewest(candidate, layers, machine, limit, slowest, is_last=False, least_us=least)
    if decided is None:
        found_plans.counts[SAME] += 1
        return
    made = predict(decided, layers, machine, slowest, limit)
    if candidate.pp == 1 or (made.total < slowest and made.memory <= limit):  # of others no pipeline was simulated
        found_plans.tried.append(made)
    if made.host > (machine.disk_share if candidate.folder else machine.host_share)(candidate.size):
        found_plans.counts[DISK_LARGER if candidate.folder else HOST_LARGER] += 1
        if found_plans.least_host is None or made.host < found_plans.least_host.host:
            found_plans.least_host = made
        return
    if not found_plans.best:
        if made.memory > limit and _is_least(found_plans, made):  # its messages count too
            made = replace(made, memory=most_bytes(decided, pipelined(decided, layers)))
        _keep_least(found_plans, made)
    if made.memory > limit:
        is_slow = candidate.again is not None and least_us(decided, layers) >= slowest  # no more layers were tried
        found_plans.counts["slower by a bound" if is_slow else "larger than the memory"] += 1
        return
    found_plans.counts["simulated"] += 1
    found_plans.best = _one_of_each([*found_plans.best, made])[:top]


def _one_of_each(plans: Iterable[Prediction]) -> list[Prediction]:
    """The fastest first. Of those that differ in nothing but where their axes lie, the nearest to `ORDER`: products
    hide all that moves farther. Of those with other stages of ZeRO and the same figures, the lowest."""
    first: dict[Prediction, Prediction] = {}
    for each in sorted(plans, key=lambda each: (each.total, each.candidate.zero, _places(each.candidate))):
        first.setdefault(replace(each, candidate=each.candidate._replace(order=ORDER, zero=0)), each)
    return list(first.values())


def _places(candidate: Candidate) -> list[int]:
    """The places of its axes in `ORDER`, outermost first."""
    return [ORDER.index(axis) for axis, _ in candidate.axes]


def _keep_least(found_plans: FoundPlans, made: Prediction) -> None:
    if _is_least(found_plans, made):
        found_plans.least = made


def _is_least(found_plans: FoundPlans, made: Prediction) -> bool:
    return found_plans.least is None or made.memory < found_plans.least.memory
