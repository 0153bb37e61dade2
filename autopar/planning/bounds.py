"""What no plan falls below: bounds of its time, each of which takes more to know than the one before, and of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.machines import Machine
from autopar.planning.layer_budget import MIXES, least_count
from autopar.planning.price.cost import Cost, Linear
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import DataGroups
from autopar.planning.price.pipelined import Pipelined, with_least_memory, without_messages
from autopar.planning.price.predict import rank_bytes, timed
from autopar.planning.shallow.held_bytes import MOMENTS
from autopar.planning.space.candidates import NOTHING, Candidate
from autopar.planning.space.micro import HIGH
from autopar.planning.space.split import Split
from autopar.planning.stage_bound import LayerCost, apart, least_again, most_layers, stored_apart

LEAST_FORWARD = 0.25  # of a micro-batch's time: backward products are twice the forward ones, and attention's 2.5


@dataclass(frozen=True, slots=True)
class LeastWork:
    """What every plan has to do. flops: of the products of a step, as the model asks for them; least: without what the
    mask of causal attention hides. parameters, frozen: bytes of all, and of those that are not trained. dtype: of most
    products."""

    flops: float
    least: float
    parameters: float
    dtype: str
    frozen: float = 0.0


class Bounds:
    """What no plan falls below. equal: layers of the model that are equal."""

    def __init__(self, layers: Layers, work: LeastWork, machine: Machine, equal: int) -> None:
        self.layers, self.work, self.machine, self.equal = layers, work, machine, equal
        self.rising = machine.rising()
        device, flops = machine.device, machine.device.flops
        best = max(share for _, share in device.products.points) * max(1.0, device.attention, device.convolution)
        self._flop_us = 1e6 / (flops.get(work.dtype, flops["float32"]) * best)
        self._data: dict[Hashable, tuple[float, float]] = {}
        self._micro: dict[Hashable, tuple[float, float, float]] = {}  # as of `Layers.least_us`
        self._wholes: dict[str, Cost] = {}
        self._costs_of: dict[Hashable, Cost] = {}
        self._larger: dict[Hashable, bool] = {}
        self._memory: dict[Hashable, float] = {}
        self._most: dict[Hashable, float] = {}
        self._held: dict[Hashable, float] = {}
        self._steps: dict[Candidate, float] = {}  # by twin
        self.slowest = math.inf  # us from which on nobody asks how much more a plan takes
        self.limit = math.inf  # bytes that a rank may hold

    def products(self, candidate: Candidate) -> float:
        """us of the products of a step at the best share of the peak that the machine reaches."""
        return self.work.least * self._flop_us / (candidate.data * candidate.tp * candidate.pp) * _filling(candidate)

    def ranks(self, candidate: Candidate) -> float:
        """`rows` without what moves over data axes: the same for all stages of ZeRO."""
        return self._least(candidate, max(HIGH, candidate.rows), False, False, moves=False)

    def rows(self, candidate: Candidate, is_again: bool = False) -> float:
        """us of the calls of a step, as if each rank of cp and ulysses had its part of every call of many whole
        rows, nothing was computed again and collectives were hidden as well as can be; and of its data axes."""
        return self._least(candidate, max(HIGH, candidate.rows), False, is_again)

    def parts(self, candidate: Candidate, is_again: bool = False) -> float:
        """A lower bound by the program compiled for this cp. What cp divides has few rows. For plans with
        ulysses no program is made yet: by that of the plan with as many ranks of cp alone, if nothing moved there."""
        made = candidate if candidate.ulysses == 1 else candidate.twin
        if made is None or candidate.context == 1:
            return 0.0
        rows = candidate.rows if candidate.rows == self.layers.micros.low else max(HIGH, candidate.rows)
        return self._least(candidate, rows, True, is_again)

    def again(self, candidate: Candidate) -> float:
        """The greater of these, with the products that are computed again at the best share of the peak."""
        return max(self.rows(candidate, is_again=True), self.parts(candidate, is_again=True))

    def twin(self, candidate: Candidate) -> float:
        """us of a plan with ulysses, at least, by the calls of that with as many ranks of cp alone: they compute the
        same, and what differs is what moves over these ranks."""
        twin = candidate.twin
        if twin is None:
            return 0.0
        if twin.again is None:
            return self._still(twin, twin.recompute) * self.calls(twin)
        parts = [self._still(twin, policy) * self._of_policy(twin, policy) for policy in ("none", "selective")]
        return min(*parts, self.rows(twin._replace(recompute="full", again=None), is_again=True))

    def twin_step(self, candidate: Candidate) -> float:
        """A lower bound by the whole step of the plan with cp alone."""
        twin = candidate.twin
        if twin is None or twin.again is not None:
            return 0.0
        if twin not in self._steps:
            part = self._still(twin, twin.recompute)
            self._steps[twin] = part * timed(twin, self.layers, self.machine, self.slowest / part).total
        return self._steps[twin]

    def _still(self, twin: Candidate, policy: str) -> float:
        """What is left of the time of each pass if nothing moves over cp, at least."""
        return self.layers.still(twin.split, twin.rows, policy, twin.halves)

    def calls(self, candidate: Candidate) -> float:
        """us of the calls of a step, as if pp divided them without a rest. Where a part of the layers is computed
        again, the least of what none, all or some of it take; where activations wait in the host's memory, what the
        step takes with none of them there: copies hold calls up, and nothing else."""
        if candidate.again is not None:
            return self._of_mixes(candidate)
        least = self._of_policy(candidate, candidate.recompute)
        is_open = candidate.memory > 0 and least < self.slowest
        if not is_open:
            return least
        return max(least, timed(candidate, self.layers, self.machine, self.slowest).total)

    def _least_again(
        self, candidate: Candidate, costs: Mapping[str, Cost], less: str, more: str, is_exact: bool
    ) -> tuple[LayerCost, float]:  # fmt: skip
        """How many layers compute more again at least in a plan that takes less than `slowest`."""
        layer = LayerCost.of(candidate, costs[less], *self._changes(candidate, costs, less, more))
        if math.isinf(self.limit):
            return layer, 0.0
        if candidate.pp == 1 and not is_exact:
            over = max(0.0, self.memory(candidate._replace(recompute=less, again=None)) - self.limit)
            return layer, over / layer.less if layer.less > 0 else over and math.inf
        if candidate.pp == 1:
            return layer, self._least_count(candidate, less, more, layer.less, self.limit)
        most, cut = self.slowest / candidate.microbatches, self._apart(candidate, less, more)
        return layer, least_again(candidate, layer, self.equal, cut, self.limit, most)

    def _least_count(self, candidate: Candidate, less: str, more: str, saving: float, limit: float) -> float:
        """That of a plan without a pipeline, in at most `limit` bytes."""
        assert candidate.again is not None
        mix = candidate._replace(again=replace(candidate.again, less=less, more=more))
        count = least_count(mix, self.layers, limit, saving)
        return count if count < self.equal else math.inf

    def _costs(self, candidate: Candidate) -> Mapping[str, Cost]:
        """By policy; of a pipeline, on ranks with nothing between them."""
        split = candidate.split.near if candidate.pp > 1 else candidate.split
        return {policy: self._cost(candidate, split, policy, halves=False) for policy in ("none", "selective")}

    def near(self, candidate: Candidate) -> float:
        """us of a pipeline by the calls of its micro-batches on ranks with nothing between them, with gradients of
        weights and of inputs in one graph: there more hides what moves. No programs are needed that memory does not
        need too. Of a plan without one whose layers are computed again in part, without its own memory."""
        if candidate.again is not None:
            return self._of_mixes(candidate, is_exact=False) if candidate.pp == 1 else 0.0
        if candidate.pp == 1:
            return 0.0
        return self._of_cost(candidate, self._cost(candidate, candidate.split.near, candidate.recompute, halves=False))

    def _of_policy(self, candidate: Candidate, policy: str) -> float:
        return self._of_cost(candidate, self._cost(candidate, candidate.split, policy, candidate.halves))

    def _cost(self, candidate: Candidate, split: Split, policy: str, halves: bool) -> Cost:
        key = self.layers.place(split), candidate.rows, policy, halves, candidate.pp > 1, candidate.adds
        if key not in self._costs_of:
            cost = self.layers.cost(split, candidate.rows, policy, halves)
            cost = cost.in_stages() if candidate.pp > 1 else cost
            self._costs_of[key] = cost if candidate.adds else cost.alone
        return self._costs_of[key]

    def _of_cost(self, candidate: Candidate, cost: Cost, again: float = 0.0) -> float:
        """again: us of what is computed again beside."""
        busy = cost.forward_busy(self.equal) + cost.backward_busy(self.equal)
        return self._step(candidate, cost.forward(self.equal), cost.backward(self.equal) + again, busy)

    def _of_mixes(self, candidate: Candidate, is_exact: bool = True) -> float:
        """us of a plan of which a part of the layers is computed again, at least, of all mixes. Where none can be
        as fast as `slowest`, that is what it takes. is_exact: False of a plan without a pipeline by
        bounds of memory."""
        costs, found = self._costs(candidate), math.inf
        for less, more in MIXES:
            least = self._of_cost(candidate, costs[less])
            if least < min(found, self.slowest) and math.isfinite(self.limit):
                least = max(least, min(self.slowest, self.of_mix(candidate, less, more, is_exact)))
            found = min(found, least)
        return found

    def of_mix(self, candidate: Candidate, less: str, more: str, is_exact: bool = True) -> float:
        """us of a plan at least of which as few layers compute more again as its memory allows; infinite where it has
        too few. is_exact: as of `_of_mixes`."""
        costs = self._costs(candidate)
        layer, count = self._least_again(candidate, costs, less, more, is_exact)
        return self._of_cost(candidate, costs[less], count * layer.longer) if math.isfinite(count) else math.inf

    def _changes(
        self, candidate: Candidate, costs: Mapping[str, Cost], less: str, more: str
    ) -> tuple[float, float]:  # fmt: skip
        """us that a layer takes longer at least, and bytes that it keeps less at most. No programs are made that
        compute all again."""
        if more == "selective":
            return _each(costs[more]) - _each(costs[less]), costs[less].saved.each - costs[more].saved.each
        products = self.layers.flops_again(more) * candidate.rows / candidate.tp / candidate.context * self._flop_us
        longer = products / max(self.equal, 1) - (_each(costs[less]) - _each(costs["none"]))
        return longer, costs[less].saved.each

    def _apart(self, candidate: Candidate, *policies: str) -> float:
        near, mesh = candidate.split.near, Mesh(candidate.axes)

        def cut() -> float:
            return apart(self.layers.sections(near, candidate.rows, policy, mesh).layer for policy in policies)

        return self.layers.kept(("apart", near, candidate.rows, policies), cut)

    def _least(
        self, candidate: Candidate, rows: int, is_split: bool, is_again: bool, moves: bool = True
    ) -> float:  # fmt: skip
        """By a program of so many rows, on as many ranks of cp (is_split) or on one."""
        lies = candidate.twin or candidate  # where tp lies in the mesh is the same
        is_still = candidate.ulysses > 1 and is_split
        key = lies.axes, candidate.sequence, candidate.rows, rows, is_split, is_still
        if key not in self._micro:
            of = lies.split.near if is_split else Split(candidate.tp, candidate.sequence)
            share = candidate.rows / rows * of.context / candidate.context
            self._micro[key] = self.layers.least_us(lies.split, of, rows, share, is_still)
        forward, backward, busy = self._micro[key]
        if is_again and candidate.again is None:
            flops = self.layers.flops_again(candidate.recompute) * candidate.rows
            more = flops / (candidate.tp * candidate.context) * self._flop_us
            backward, busy = backward + more, busy + more
        return self._step(candidate, forward, backward, busy, moves)

    def _step(self, candidate: Candidate, forward: float, backward: float, busy: float, moves: bool = True) -> float:
        """busy: us of a micro-batch on the device, where what moves over the data axes takes a part of it. moves: False
        as if nothing did."""
        once, each = self._data_us(candidate) if moves else (0.0, 0.0)
        taken = 1.0 if self.machine.is_host else self.machine.device.communicating
        own = max((forward + backward) / candidate.pp, busy / candidate.pp + taken * each, each)
        return candidate.microbatches * own * _filling(candidate, forward / candidate.pp / own) + once

    def _data_us(self, candidate: Candidate) -> tuple[float, float]:
        key = candidate.axes, candidate.zero, candidate.gathers_again, candidate.microbatches
        if key not in self._data:
            self._data[key] = least_data_us(candidate, self._whole("full"), self.equal, self.rising)
        return self._data[key]

    @property
    def steps(self) -> tuple[Callable[[Candidate], float], ...]:
        """One after the other, each takes more to know than the one before."""
        first = self.products, self.ranks, self.rows, self.parts, self.again
        return *first, self.twin, self.twin_step, self.near, self.calls

    @property
    def memories(self) -> Mapping[int, Callable[[Candidate], float]]:
        """The bounds of memory that are looked at before some of these steps."""
        return {1: self.memory, 2: self.memory, 4: self.memory, 6: self.twin_memory}

    def twin_memory(self, candidate: Candidate) -> float:
        """Bytes of a plan with ulysses, at least, by that with as many ranks of cp alone: they keep the same for the
        backward pass. What is alive beside that may differ."""
        twin = candidate.twin
        if twin is None or twin.again is not None:
            return 0.0
        return self.held(twin)

    def memory(self, candidate: Candidate) -> float:
        """Bytes of a rank's part of parameters, states and copies, of gradients, and of what a micro-batch keeps, at
        least: that of the mean rank."""
        one = candidate  # neither the order of its axes nor its schedule says anything here
        key = (*one[:7], one.fsdp, one.cp, one.ulysses, one.reshard_after_forward, one.offload, one.memory)
        if key not in self._memory:
            self._memory[key] = self._mean(candidate)
        return self._memory[key]

    def _mean(self, candidate: Candidate) -> float:
        whole, layers = self._whole("full" if candidate.again else candidate.recompute), self.equal
        part = (self.work.parameters - self.work.frozen) / candidate.tp / candidate.pp
        frozen = self.work.frozen / candidate.tp / candidate.pp / candidate.frozen_shards
        moments = MOMENTS if candidate.offload == NOTHING else 0
        stored = (1 + moments) * part / candidate.shards + frozen
        copies = whole.copies(layers) / candidate.tp / candidate.pp
        if candidate.zero == 3:  # of the layer at work and of the next one
            copies = 2 * (whole.copies.each + whole.plain.each) / candidate.tp
        gradients = part / candidate.parts
        ranks = candidate.tp * candidate.pp * candidate.context
        saved = whole.saved.each * layers * candidate.rows / self.layers.micros.low / ranks * (not candidate.memory)
        if candidate.is_hosted:
            return saved
        if candidate.pp == 1 and candidate.microbatches > 1:  # the last pass comes when there are gradients
            return stored + copies + gradients + saved
        if candidate.is_alone:  # what was cast or gathered goes with its last reader
            return stored + max(copies + saved, gradients)
        return stored + copies + max(gradients, saved)

    def is_larger(self, candidate: Candidate, limit: float) -> bool:
        """True if a rank holds more than so many bytes, by its stages (`held`)."""
        if candidate.again is not None:
            return self._is_larger_in_part(candidate, limit)
        if candidate.memory and candidate.pp == 1:
            return self._is_larger_than_both(candidate, limit)
        if candidate.pp == 1 or candidate.is_hosted or candidate.memory:  # what is stored, or saved, waits elsewhere
            return False
        if self._most_layers(candidate, limit) < self.equal * (1 - 1e-9):  # then nobody asks how it is cut
            return True
        made = with_least_memory(candidate, self.layers)
        key = *_memory_key(candidate, made), limit
        if key not in self._larger:
            self._larger[key] = any(bytes_ > limit for bytes_ in _ranks(candidate, made))
        return self._larger[key]

    def _most_layers(self, candidate: Candidate, limit: float) -> float:
        """That the ranks of a pipeline hold together, at most."""
        near, policy, one = candidate.split.near, candidate.recompute, candidate
        key = (
            near, policy, one.rows, one.pp, one.chunks, one.schedule, one.microbatches, one.zero, one.gathers_again,
            one.shards, limit,
        )  # fmt: skip
        if key not in self._most:
            layer = LayerCost.of(candidate, self.layers.cost(near, one.rows, policy), 0.0, 0.0)
            mesh = Mesh(candidate.axes)
            cut = self.layers.kept(
                ("stored apart", near, one.rows, policy),
                lambda: stored_apart(self.layers.sections(near, one.rows, policy, mesh).layer),
            )
            self._most[key] = most_layers(candidate, layer, cut, limit)
        return self._most[key]

    def _is_larger_in_part(self, candidate: Candidate, limit: float) -> bool:
        """True if no mix of policies is small enough, wherever its cuts lie: "full" keeps least."""
        costs = self._costs(candidate)
        if candidate.pp == 1:
            saving = (self._changes(candidate, costs, less, more)[1] for less, more in MIXES)
            counts = (self._least_count(candidate, *mix, most, limit) for mix, most in zip(MIXES, saving, strict=True))
            return all(map(math.isinf, counts))
        layer = LayerCost.of(candidate, costs["none"], *self._changes(candidate, costs, "none", "full"))
        cut = self._apart(candidate, "none", "full")
        return math.isinf(least_again(candidate, layer, self.equal, cut, limit, math.inf))

    def _is_larger_than_both(self, candidate: Candidate, limit: float) -> bool:
        """True if what a rank holds beyond so many bytes is more than its share of the host's memory; False as long as
        no plan is found, for then what the host lacks is told."""
        if math.isinf(self.slowest):
            return False
        over = rank_bytes(candidate, without_messages(candidate, self.layers), 0) - limit
        return over > self.machine.host_share(candidate.size)

    def held(self, candidate: Candidate) -> float:
        """Bytes that the fullest rank stores, and saves of the micro-batches that are under way, at least: by its
        stages and the order of its actions."""
        if candidate.again is not None:
            return self.held(candidate._replace(recompute="full", again=None))
        if candidate.pp == 1 or candidate.is_hosted or candidate.memory:
            return self.memory(candidate)
        made = with_least_memory(candidate, self.layers)
        key = _memory_key(candidate, made)
        if key not in self._held:
            self._held[key] = max(_ranks(candidate, made))
        return self._held[key]

    def _whole(self, policy: str) -> Cost:
        """The cost of the fewest rows on one rank."""
        if policy not in self._wholes:
            self._wholes[policy] = self.layers.cost(Split(), self.layers.micros.low, policy)
        return self._wholes[policy]


def _each(cost: Cost) -> float:
    """us of an equal layer."""
    return cost.forward.each + cost.backward.each


def _memory_key(candidate: Candidate, made: Pipelined) -> tuple[Hashable, ...]:
    return made, candidate.zero, candidate.gathers_again, candidate.shards, candidate.microbatches


def _ranks(candidate: Candidate, made: Pipelined) -> Iterator[float]:
    return (rank_bytes(candidate, made, rank) for rank in range(candidate.pp))


def _filling(candidate: Candidate, forward: float = LEAST_FORWARD) -> float:
    """How much longer a pipeline takes at least that fills and empties. forward: the part of a micro-batch's time that
    its forward pass takes. 1F1B: (m + (p - 1) / v) / m. Where gradients of weights fill the bubble, ranks begin one
    after the other: the mean of them waits for the forward passes of half of the stages before the last one.
    """
    waits = forward / 2 if candidate.halves else 1.0
    return 1 + waits * (candidate.pp - 1) / candidate.chunks / candidate.microbatches


def least_data_us(candidate: Candidate, whole: Cost, layers: int, machine: Machine) -> tuple[float, float]:
    """What the rank that waits longest waits at least, once a step, and of a pipeline what a rank moves for each
    micro-batch, beside whatever it computes. whole: of a micro-batch on one rank, of as many layers; tp and
    pp divide all of it, and products hide what they can. machine: the larger a collective, the faster."""
    if candidate.data == 1:
        return 0.0, 0.0
    parts, deep, read = candidate.tp * candidate.pp, max(layers, 1), _read(candidate, whole)
    gradients, parameters = whole.gradients(layers) / parts, read(layers) / parts
    groups = DataGroups.of(candidate, machine.ranks)
    summed = machine.collective_us("all_reduce", gradients / groups.shards.size, groups.copies)
    gathered = machine.collective_us("all_gather", parameters, groups.shards)
    scattered = machine.collective_us("reduce_scatter", gradients, groups.shards)
    if candidate.pp > 1 and candidate.zero >= 2:
        return (summed, gathered + scattered) if candidate.gathers_again else (summed + gathered, scattered)
    if not candidate.zero:
        scattered, summed = summed, 0.0
    count, last = candidate.microbatches, scattered / deep  # beside the last one nothing is computed
    if candidate.is_alone:
        summed = _hidden(summed, machine)
    if candidate.gathers_again:
        own, each = deep / candidate.pp, read.each / candidate.tp
        outside = machine.collective_us("all_gather", parameters - own * each, groups.shards)
        gathered = 2 * (own * machine.collective_us("all_gather", each, groups.shards) + outside)  # for each pass
        return _hidden(count * (gathered + scattered), machine) + last + summed, 0.0
    if count == 1:
        gathered = _hidden(gathered, machine)
    if count == 1 or candidate.zero >= 2:
        return gathered + _hidden(count * scattered, machine) + last + summed, 0.0
    return gathered + max(scattered, summed), 0.0  # of what is scattered some may be added while more is


def _read(candidate: Candidate, whole: Cost) -> Linear:
    """Bytes of the parameters as a step reads them: what is gathered, in the dtype that computes."""
    copies, plain = whole.gathered(candidate.zero == 3)
    return Linear(copies.outside + plain.outside, copies.each + plain.each)


def _hidden(moved: float, machine: Machine) -> float:
    """us by which calls end later for collectives of `moved` us beside them, which have a part of the device while they
    are under way (passes/costs/streams.py)."""
    return machine.device.communicating * moved
