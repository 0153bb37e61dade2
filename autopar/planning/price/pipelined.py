"""The pipeline of a candidate: what each stage has of the model, in which order it runs, and how long that takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from operator import add
from types import MappingProxyType

import numpy as np
import torch

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Costs, Flow, Timeline, Work, actions_of
from autopar.machines import Machine
from autopar.passes.schedules import (
    Schedule,
    Walk,
    in_halves,
    parse_schedule,
    simulate,
    turns_between,
    with_transfers,
)
from autopar.planning.price.cost import Cost
from autopar.planning.price.data_streams import Data, MovingGraph, WeightSlot, slots_of
from autopar.planning.price.held_messages import NO_MESSAGES, HeldMessages, held_messages
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import Known
from autopar.planning.price.stage_copies import StageCopies
from autopar.planning.price.whole_step import WholeStep
from autopar.planning.space.candidates import GPIPE, Candidate
from autopar.planning.space.deal import Sections, Share, whole
from autopar.runtime.ranks.p2p import LEAVING_BYTES

Kind = tuple[int, str]  # of a stage, and of what runs on it
COLUMNS = 5  # of a stage
SAVED, LATE, GRADIENTS, OTHERS, AHEAD = range(COLUMNS)
CLOSE = 1e-6  # of a layer: where a stage begins this near to it, it begins with it
FILLED = 2  # micro-batches a rank that, with two more, fill any of one stage a rank but GPipe's
ROUNDS = 4  # micro-batches a rank that are looked at: each one more takes as long as the one before


@dataclass(frozen=True, eq=False)
class Stage:
    """What of the model a stage has, or a rank, and what that costs. whole: the cost of the whole model. us: of each
    action on one micro-batch, F, and B or its halves I and W, with what it moves over the data axes. slots: its calls,
    in the order of the forward pass. moved: bytes of what its backward pass moves, at most, by section. step: of a plan
    without a pipeline. copies: where a part of what it keeps waits in the host's memory."""

    share: Share
    whole: Cost
    us: Mapping[str, float]
    slots: tuple[WeightSlot, ...] = ()
    moved: tuple[float, ...] = (0.0, 0.0, 0.0)
    step: WholeStep | None = None
    copies: StageCopies | None = None

    @cached_property  # of many pipelines only the first rank is looked at
    def cost(self) -> Cost:
        return self.whole.on(self.share)

    @property
    def micro_us(self) -> float:
        """The us of one micro-batch."""
        return sum(self.us.values())

    @property
    def moved_us(self) -> float:
        """The part of it that it takes longer for the data axes."""
        layers = self.share.time.layers
        return self.micro_us - self.cost.forward(layers) - self.cost.backward(layers)

    def __add__(self, other: Stage) -> Stage:
        """Both on one rank."""
        us = {kind: self.us[kind] + other.us[kind] for kind in self.us}
        return Stage(self.share + other.share, self.whole, us, self.slots + other.slots)


@dataclass(frozen=True, slots=True, eq=False)
class Pipelined:
    """stages: of the pipeline; of a plan without one, one. ranks: what each rank has of the model, all its stages
    together. schedule: of the first micro-batches, `count` of them. moments: of each rank in it. row: bytes of a row of
    the batch; beside: of what else of a step's inputs each rank is given (buffers)."""

    stages: Sequence[Stage]
    ranks: Sequence[Stage]
    schedule: Schedule
    moments: Sequence[Moments]
    count: int
    row: float
    beside: float

    def times(self) -> Mapping[tuple[int, str], float]:
        """us of each action on one micro-batch, by stage and kind."""
        return {(s, kind): us for s, stage in enumerate(self.stages) for kind, us in stage.us.items()}


def pipelined(candidate: Candidate, layers: Layers) -> Pipelined:
    """The pipeline of a candidate. Raises AutoparError as `Micros.local`."""
    made = without_messages(candidate, layers)
    if candidate.pp == 1:
        return made
    moments = _moments(*_drawn(candidate, len(made.stages)), candidate.halves)
    return replace(made, moments=moments)


def without_messages(candidate: Candidate, layers: Layers) -> Pipelined:
    """A pipeline whose ranks hold nothing that comes from other ranks or goes there: so much at least, and many are
    too large with that. Raises AutoparError as `Micros.local`."""
    model = layers.place(layers.ranks_of(candidate)), candidate.halves, *_model(candidate, layers)

    def make() -> Pipelined:
        stages = layers.kept(("stages", *model), lambda: _stages(candidate, layers))
        return _pipelined(candidate, stages, layers, has_copies=candidate.moved > 0 and candidate.pp > 1)

    kept: Pipelined = layers.kept((*model, *_order(candidate)), make)
    return kept


def with_least_memory(candidate: Candidate, layers: Layers) -> Pipelined:
    """A pipeline whose stages hold what they store and save, and no more: nothing that is alive while a graph runs,
    and nothing that gradients of weights wait for, nor messages. No graphs of halves are needed, nor where ranks of tp
    and cp lie.
    Raises AutoparError as `Micros.local`."""
    near, (policy, more) = candidate.split.near, candidate.policies
    model = "least memory", near, *_model(candidate, layers)

    def stages() -> Sequence[Stage]:
        cost = layers.kept(
            ("kept", near, candidate.rows, policy, more),
            lambda: layers.cost(near, candidate.rows, policy, more=more).kept.in_stages(),
        )
        shares = _shares(candidate, layers)
        alike = {share: Stage(share, cost, {}) for share in shares}  # the inner ones mostly have equal shares
        return [alike[share] for share in shares]

    kept: Pipelined = layers.kept(
        (*model, *_order(candidate)), lambda: _pipelined(candidate, layers.kept(model, stages), layers)
    )
    return kept


def least_us(candidate: Candidate, layers: Layers) -> float:
    """us of the micro-batches of the slowest rank."""
    return candidate.microbatches * max(rank.micro_us for rank in pipelined(candidate, layers).ranks)


def data_of(candidate: Candidate, layers: Layers) -> Data:
    """What a candidate moves over its data axes."""
    known: Known = layers.kept("collectives", dict)
    machine = layers.micros.machine
    machine = machine.from_disk(candidate.size) if candidate.folder and candidate.is_hosted else machine
    return Data(candidate, machine, layers.micros.options.bucket_bytes, known)


def _model(candidate: Candidate, layers: Layers) -> tuple[Hashable, ...]:
    """All that stages follow from, beside the place of their ranks of tp and cp."""
    data, one = data_of(candidate, layers), candidate
    model = one.rows, one.policies, one.ranges, one.adds, one.pp, one.is_hosted, one.folder, one.moved
    if one.pp == 1:  # a step that is one graph moves with ZeRO-1 what it moves with ZeRO-2
        zero = one.zero == 3 if one.is_alone else one.zero
        return *model, min(one.microbatches, 2), one.data > 1 and (data.groups, zero, one.gathers_again)
    is_near = _is_near(one.axes, layers.micros.machine.ranks)
    return *model, is_near, one.chunks, data.is_each and (data.groups.shards, one.gathers_again)


def _order(candidate: Candidate) -> tuple[Hashable, ...]:
    """What their schedule follows from."""
    return candidate.schedule, _first(candidate), _first(candidate) < candidate.microbatches


@cache
def _is_near(axes: tuple[tuple[str, int], ...], ranks: int) -> bool:
    """True if all stages lie in one node of so many ranks."""
    return group_of(Mesh(axes), PIPELINE, ranks).nodes == 1


def _first(candidate: Candidate) -> int:
    """Micro-batches of the schedule that is looked at: all where each one more is kept for longer."""
    return candidate.microbatches if candidate.schedule == GPIPE else min(candidate.microbatches, ROUNDS * candidate.pp)


def _pipelined(
    candidate: Candidate, stages: Sequence[Stage], layers: Layers, has_copies: bool = False
) -> Pipelined:  # fmt: skip
    p, first = candidate.pp, _first(candidate)
    schedule, moments = schedule_of(candidate, len(stages))
    if has_copies:
        begins = accumulate((stage.share.time.layers for stage in stages), initial=0.0)
        stages = [
            _with_copies(candidate, layers, stage, turns_between(schedule.orders[schedule.ranks[s]], s), begin)
            for s, (stage, begin) in enumerate(zip(stages, begins, strict=False))
        ]
    own: list[Stage | None] = [None] * p
    for stage, rank in zip(stages, schedule.ranks, strict=True):
        before = own[rank]
        own[rank] = stage if before is None else before + stage
    ranks = tuple(stage for stage in own if stage is not None)
    return Pipelined(stages, ranks, schedule, moments, first, layers.row_bytes, layers.buffer_bytes)


def _with_copies(candidate: Candidate, layers: Layers, stage: Stage, between: int, begin: float) -> Stage:
    """The stage with a part of what it keeps in the host's memory. Where gradients of weights are computed apart, what
    they wait for comes once more, for them. between: turns of its rank between its passes. begin: the layers before
    it."""
    share, net = stage.share, data_of(candidate, layers).net
    units = math.ceil(begin + share.time.layers - CLOSE) - math.floor(begin + CLOSE)
    has_piece = units > max(1, round(share.saved.layers))
    key = "copies", layers.place(candidate.split), share, between, has_piece, *_model(candidate, layers)
    copies = layers.kept(key, lambda: StageCopies.of(candidate, layers, share, between, has_piece, net))
    us = {kind: us + copies.us.get(kind, 0.0) for kind, us in stage.us.items()}
    if "W" in us:
        us["W"] = max(us["W"], net.machine.copy_us(_again(stage) * copies.inside[1]))
    return replace(stage, us=us, copies=copies)


def _again(stage: Stage) -> float:
    """The part of what a stage keeps that gradients of weights wait for, where they are computed apart."""
    kept = stage.share.saved.layers
    return stage.cost.late(kept) / stage.cost.saved(kept) if stage.cost.saved(kept) else 0.0


def _stages(candidate: Candidate, layers: Layers) -> Sequence[Stage]:
    """The stages of a candidate."""
    cost = cost_of(candidate, layers)
    if candidate.pp == 1:
        all_ = whole(layers.equal, candidate.again.count if candidate.again else 0)
        once, net = cost.on(all_).once(layers.equal), data_of(candidate, layers).net
        step = WholeStep.of(candidate, layers, layers.ranks_of(candidate), once, net)
        least = cost.on(all_).us(layers.equal, halves=False)
        return (Stage(all_, cost, {kind: max(us, least[kind]) for kind, us in step.us.items()}, step=step),)
    cost, data, shares = cost.in_stages(), data_of(candidate, layers), _shares(candidate, layers)
    sections = _sections(candidate, layers)
    slots = slots_of(sections, shares, layers.equal, candidate.ranges)
    stages, known = list[Stage](), dict[Hashable, MovingGraph]()
    for share, own in zip(shares, slots, strict=True):
        graphs, there = data.graphs(share, own, cost, known), cost.on(share)
        least = there.us(share.time.layers, candidate.halves)
        us = {kind: max(graph.moving.streams.device, least[kind]) for kind, graph in graphs.items()}
        us = {kind: _loaded(kind, each, candidate, there, share, data.machine) for kind, each in us.items()}
        backward = (graph.alive for kind, graph in graphs.items() if kind != "F")
        stages.append(Stage(share, cost, us, own, tuple(map(max, zip(*backward, strict=True)))))
    return stages


def _loaded(kind: str, us: float, candidate: Candidate, cost: Cost, share: Share, machine: Machine) -> float:
    """us of an action of a stage whose parameters wait in the host's memory: they come for each pass, a layer ahead, so
    that nothing hides the first one; sums of gradients come where they are added to, and leave."""
    if not candidate.is_hosted:
        return us
    layers, shards = share.stored.layers, candidate.shards
    comes = cost.parameters(layers) / shards if kind in "FBI" else 0.0
    sums = cost.gradients(layers) / shards if kind in "BW" else 0.0
    first = max(cost.parameters.each, cost.parameters.entry) / shards if kind in "FBI" else 0.0
    return max(us + machine.copy_us(first), machine.copy_us(comes + sums * (candidate.microbatches > 1)))


def _shares(candidate: Candidate, layers: Layers) -> Sequence[Share]:
    """What each stage of a pipeline has of the model: with ZeRO-2 and ZeRO-3 stages are cut by what they move too."""
    near, count, ranges = candidate.split.near, candidate.pp * candidate.chunks, candidate.ranges
    sections, data = _sections(candidate, layers), data_of(candidate, layers)
    moved = data.moved_us(sections) if data.is_each else ()
    is_near = _is_near(candidate.axes, layers.micros.machine.ranks)
    key = "shares", near, candidate.rows, candidate.policies, is_near, count, ranges, moved
    kept: Sequence[Share] = layers.kept(key, lambda: sections.stages(layers.equal, count, moved, ranges))
    return kept


def _sections(candidate: Candidate, layers: Layers) -> Sections:
    policy, more = candidate.policies
    return layers.sections(candidate.split, candidate.rows, policy, Mesh(candidate.axes), more)


def cost_of(candidate: Candidate, layers: Layers) -> Cost:
    """Price a micro-batch on the ranks of tp and cp, with the whole model. Raises AutoparError as `Micros.local`."""
    policy, more = candidate.policies
    cost = layers.cost(layers.ranks_of(candidate), candidate.rows, policy, candidate.halves, more)
    return cost if candidate.adds else cost.alone


def schedule_of(candidate: Candidate, stages: int) -> tuple[Schedule, tuple[Moments, ...]]:
    """That of the first micro-batches, and the moments of each rank in it."""
    return _schedule(*_drawn(candidate, stages))


def _drawn(candidate: Candidate, stages: int) -> tuple[str, int, int, int, bool]:
    """The arguments of `_schedule`."""
    first = _first(candidate)
    return candidate.schedule, candidate.pp, first, stages, first < candidate.microbatches


@cache
def _schedule(name: str, ranks: int, count: int, stages: int, has_more: bool) -> tuple[Schedule, tuple[Moments, ...]]:
    """has_more: further micro-batches follow."""
    schedule = parse_schedule(name, ranks, count, stages)
    schedule = replace(schedule, orders=in_halves(schedule.orders))
    return schedule, tuple(Moments.of(list(actions_of(order)), has_more) for order in schedule.orders)


@cache
def _moments(
    name: str, ranks: int, count: int, stages: int, has_more: bool, halves: bool
) -> tuple[Moments, ...]:  # fmt: skip
    """The moments of each rank with its messages, in a schedule of those arguments. Behind as many micro-batches as
    begin before the first one ends they come again."""
    few = count if name == GPIPE else min(count, FILLED * ranks + 2 if stages == ranks else ROUNDS * ranks)
    schedule, _ = _schedule(name, ranks, few, stages, has_more or few < count)
    works, types = dict[Kind, Work](), dict[str, TensorType]()
    for s, kind, work in _chain(stages, halves):
        works[s, kind] = work
        types |= dict.fromkeys((*work.reads, *work.writes), TensorType((1,), torch.uint8))
    messages = held_messages(schedule.orders, Flow(schedule.ranks, few, works, types))
    orders = (list(actions_of(order)) for order in schedule.orders)
    return tuple(Moments.of(order, has_more or few < count, messages) for order in orders)


def step_us(
    candidate: Candidate, made: Pipelined, once: Sequence[tuple[float, float]], machine: Machine,
    slowest: float = math.inf,
) -> float:  # fmt: skip
    """us of a step. once: of each rank, what it does before the first micro-batch and after the last one. Some
    micro-batches are looked at: with each one more a step grows by the time of the slowest rank. slowest: in us. A step
    that takes as long without its copies to and from the host is not simulated with them: that time is returned."""
    flow, costs = _flow(candidate, made, machine)
    ends = {(rank, kind): us for rank, both in enumerate(once) for kind, us in zip("PE", both, strict=True)}
    costs = replace(costs, times_us={**costs.times_us, **ends})
    more = candidate.microbatches - made.count
    span = _walk(*_drawn(candidate, len(made.stages)), candidate.halves).span_us(flow.types, costs)
    least = span + more * max(rank.micro_us for rank in made.ranks)
    if least >= slowest or not (flow.stores or flow.loads):
        return least
    flow = replace(flow, works={**flow.works, **dict.fromkeys(ends, Work())})
    timeline = simulate(with_transfers(made.schedule.orders, flow, costs), flow, costs)
    waits = [sum(both) / made.count for both in timeline.copied_us]
    return timeline.span_us + more * max(map(add, waits, (rank.micro_us for rank in made.ranks)))


@lru_cache(256)
def _walk(name: str, ranks: int, count: int, stages: int, has_more: bool, halves: bool) -> Walk:
    """Through a pipeline, with what each rank does before the first micro-batch (P) and after the last one (E)."""
    schedule, _ = _schedule(name, ranks, count, stages, has_more)
    orders = tuple((Action(r, "P", 0), *order, Action(r, "E", 0)) for r, order in enumerate(schedule.orders))
    ends = {(rank, kind): Work() for rank in range(len(orders)) for kind in "PE"}
    works = {(s, kind): work for s, kind, work in _chain(stages, halves)}
    return Walk.of(orders, Flow(schedule.ranks, count, {**works, **ends}, {}))


def pipeline_of(candidate: Candidate, layers: Layers, machine: Machine) -> tuple[Timeline, int]:
    """When each rank of a candidate's pipeline does what in the first micro-batches, and how many these are."""
    made = pipelined(candidate, layers)
    flow, costs = _flow(candidate, made, machine)
    return simulate(with_transfers(made.schedule.orders, flow, costs), flow, costs), made.count


def _flow(candidate: Candidate, made: Pipelined, machine: Machine) -> tuple[Flow, Costs]:
    """What flows between the actions of the first micro-batches, and what they take."""
    message = int(made.stages[0].cost.message.bytes_)
    works: dict[tuple[int, str], Work] = {}
    types: dict[str, TensorType] = {}
    for s, kind, work in _chain(len(made.stages), candidate.halves):
        works[s, kind] = work
        types |= dict.fromkeys((*work.reads, *work.writes), TensorType((message,), torch.uint8))
    line = machine.message_line(group_of(Mesh(candidate.axes), PIPELINE, machine.ranks))
    flow, costs = Flow(made.schedule.ranks, made.count, works, types), Costs(made.times(), *line)
    return _copied(made, flow, costs, machine) if any(stage.copies for stage in made.stages) else (flow, costs)


def _copied(made: Pipelined, flow: Flow, costs: Costs, machine: Machine) -> tuple[Flow, Costs]:
    """With what goes into the host's memory of each stage, and what comes back for each of its graphs, as one value."""
    works, types, links = dict(flow.works), dict(flow.types), dict[Kind, tuple[float, float]]()
    stores, loads = dict[Kind, dict[str, str]](), dict[Kind, dict[str, str]]()
    for (s, kind), work in flow.works.items():
        stage, here, there = made.stages[s], f"{kind}{s}", f"host{s}"
        copies, is_out = stage.copies, kind == "F"
        assert copies is not None, "all stages have copies, or none"
        part = _again(stage) if kind == "W" else 1.0
        size = copies.out if is_out else part * copies.back
        types[here] = TensorType((round(size),), torch.uint8)
        if is_out:
            types[there], stores[s, kind] = types[here], {there: here}
            links[s, kind] = machine.copy_us(copies.inside[0]), 0.0
            works[s, kind] = replace(work, writes=(*work.writes, here))
        else:
            loads[s, kind] = {here: there}
            links[s, kind] = 0.0, machine.copy_us(part * copies.inside[1])
            works[s, kind] = replace(work, reads=(*work.reads, here))
    costs = replace(costs, host_bytes_per_us=machine.to_host / 1e6, links_us=links)
    return replace(flow, works=works, types=types, stores=stores, loads=loads), costs


def _chain(count: int, halves: bool) -> Iterator[tuple[int, str, Work]]:
    """Stages one behind the other, with one value between two of them on the way there and back."""
    last = count - 1
    for s in range(count):
        there = ((f"x{s}",) if s else ()), ((f"x{s + 1}",) if s < last else ())
        back = ((f"g{s + 1}",) if s < last else ()), ((f"g{s}",) if s else ())
        yield s, "F", Work(there[0], (*there[1], f"saved{s}"))
        if halves:
            yield s, "I", Work((*back[0], f"saved{s}"), (*back[1], f"late{s}"))
            yield s, "W", Work((f"late{s}",))
        else:
            yield s, "B", Work((*back[0], f"saved{s}"), back[1])


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """stages: of the rank. counts: a row for each moment that differs from the others, and for each stage how many of
    its micro-batches are saved, how many wait for their gradients of weights, whether its gradients are there,
    whether it is at work in its backward pass, and whether it has a forward pass ahead. messages: of each moment those
    that come, and that leave (`HeldMessages`)."""

    stages: tuple[int, ...]
    counts: np.ndarray
    messages: np.ndarray

    @classmethod
    def of(
        cls, order: Sequence[Action], has_more: bool, messages: Mapping[Action, HeldMessages] = MappingProxyType({})
    ) -> Moments:  # fmt: skip
        """The moments of a rank's actions: F, and B or its halves I and W. has_more: further micro-batches follow.
        messages: by action; none where they are not asked for."""
        stages = tuple(sorted({action.stage for action in order}))
        column = {stage: COLUMNS * i for i, stage in enumerate(stages)}
        held, rows = [0] * (COLUMNS * len(stages)), dict[tuple[tuple[int, ...], HeldMessages], None]()
        left = Counter(action.stage for action in order if action.kind == "F")
        for stage in stages:
            held[column[stage] + AHEAD] = 1
        for action in order:
            at, now = column[action.stage], messages.get(action, NO_MESSAGES)
            if action.kind == "F":
                held[at + SAVED] += 1
                left[action.stage] -= 1
                held[at + AHEAD] = int(has_more or left[action.stage] > 0)
                if now.leaving:  # else a backward pass holds more
                    rows[tuple(held), now] = None
                continue
            held[at + OTHERS] = 1
            rows[tuple(held), now] = None
            held[at + OTHERS] = 0
            if action.kind != "I":
                held[at + GRADIENTS] = 1
            held[at + (LATE if action.kind == "W" else SAVED)] -= 1
            held[at + LATE] += action.kind == "I"
            rows[tuple(held), NO_MESSAGES] = None
        return cls(stages, *(np.array(list(columns), dtype=float) for columns in zip(*rows, strict=True)))

    def most(self, each: Sequence[tuple[float, float, float, float, float]], message: float = 0.0) -> float:
        """The most bytes at once. each: of what a moment counts, by stage. message: of one."""
        return float(self._bytes(each, message).max())

    def fullest(self, each: Sequence[tuple[float, float, float, float, float]], message: float) -> np.ndarray:
        """The counts of that moment, a row for each stage."""
        row: np.ndarray = self.counts[self._bytes(each, message).argmax()]
        return row.reshape(-1, COLUMNS)

    def _bytes(self, each: Sequence[tuple[float, float, float, float, float]], message: float) -> np.ndarray:
        coming, leaving = message * self.messages.T
        return self.counts @ np.array(each).ravel() + coming + np.minimum(leaving, LEAVING_BYTES + message)
