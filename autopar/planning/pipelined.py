"""The pipeline of a candidate: what each stage has of the model, in which order it runs, and how long that takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from autopar.ir.measure import group_of
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Costs, Flow, Timeline, Work
from autopar.machines import Machine
from autopar.passes.schedules import Schedule, parse_schedule, simulate, span_us, with_transfers
from autopar.planning.candidates import Candidate
from autopar.planning.cost import Cost
from autopar.planning.deal import Share, whole
from autopar.planning.layers import Layers
from autopar.planning.moments import Moments
from autopar.planning.split import Axes, Split

ROUNDS = 4  # micro-batches a rank that are looked at: each one more takes as long as the one before


@dataclass(frozen=True, eq=False)
class Stage:
    """What of the model a stage has, or a rank, and what that costs. whole: the cost of the whole model."""

    share: Share
    whole: Cost

    @cached_property  # of many pipelines only the first rank is looked at
    def cost(self) -> Cost:
        return self.whole.on(self.share)

    def us(self, kind: str) -> float:
        """Of an action on one micro-batch: F, B, or its halves I and W."""
        layers, weights = self.share.time.layers, self.cost.weights
        if kind == "F":
            return self.cost.forward(layers)
        return weights(layers) if kind == "W" else self.cost.backward(layers) - (weights(layers) if kind == "I" else 0)

    @property
    def micro_us(self) -> float:
        """Of one micro-batch."""
        return self.us("F") + self.us("B")


@dataclass(frozen=True, slots=True, eq=False)
class Pipelined:
    """stages: of the pipeline; of a plan without one, one. ranks: what each rank has of the model, all its stages
    together. schedule: of the first micro-batches, `count` of them. moments: of each rank in it."""

    stages: Sequence[Stage]
    ranks: Sequence[Stage]
    schedule: Schedule
    moments: Sequence[Moments]
    count: int

    def times(self, halves: bool) -> Mapping[tuple[int, str], float]:
        """us of each action on one micro-batch, by stage and kind."""
        kinds = "FIW" if halves else "FB"
        return {(s, kind): stage.us(kind) for s, stage in enumerate(self.stages) for kind in kinds}


def pipelined(candidate: Candidate, layers: Layers) -> Pipelined:
    """The pipeline of a candidate. Raises AutoparError as `Micros.local`."""
    key = layers.place(_split(candidate, layers)), *_order(candidate, layers)
    found: Pipelined = layers.kept(key, lambda: _pipelined(candidate, layers, cost_of(candidate, layers)))
    return found


def with_least_memory(candidate: Candidate, layers: Layers) -> Pipelined:
    """The same with stages that hold what they store and save, and no more: nothing that is alive while a graph runs,
    and nothing that gradients of weights wait for. No graphs of halves are needed, nor where ranks of tp and cp lie.
    Raises AutoparError as `Micros.local`."""
    near = candidate.split.near
    key = "least memory", near, *_order(candidate, layers)

    def make() -> Pipelined:
        return _pipelined(candidate, layers, layers.cost(near, candidate.rows, candidate.recompute).kept)

    found: Pipelined = layers.kept(key, make)
    return found


def _order(candidate: Candidate, layers: Layers) -> tuple[Hashable, ...]:
    """All that a pipeline follows from beside the place of its ranks of tp and cp."""
    return (
        candidate.rows, candidate.recompute, candidate.again, candidate.pp,
        candidate.pp == 1 or _is_near(candidate.axes, layers.micros.machine.ranks),
        candidate.schedule, candidate.chunks, _first(candidate),
    )  # fmt: skip


@cache
def _is_near(axes: Axes, ranks: int) -> bool:
    """True if all stages lie in one node of so many ranks."""
    return group_of(Mesh(axes), PIPELINE, ranks).nodes == 1


def _first(candidate: Candidate) -> int:
    return min(candidate.microbatches, ROUNDS * candidate.pp)


def _pipelined(candidate: Candidate, layers: Layers, cost: Cost) -> Pipelined:
    p, count, first = candidate.pp, candidate.pp * candidate.chunks, _first(candidate)
    shares: Sequence[Share] = (whole(layers.equal),)
    if p > 1:
        cost = cost.in_stages()
        shares = layers.stages(candidate.split, candidate.recompute, Mesh(candidate.axes), count)
    schedule, moments = _schedule(candidate.schedule, p, first, count)
    own: list[Share | None] = [None] * p
    for share, rank in zip(shares, schedule.ranks, strict=True):
        before = own[rank]
        own[rank] = share if before is None else before + share
    ranks = tuple(Stage(share, cost) for share in own if share is not None)
    return Pipelined(tuple(Stage(share, cost) for share in shares), ranks, schedule, moments, first)


def _split(candidate: Candidate, layers: Layers) -> Split:
    return candidate.split.summed(candidate.axes) if layers.micros.coupled else candidate.split


def cost_of(candidate: Candidate, layers: Layers) -> Cost:
    """Of a micro-batch on the ranks of tp and cp, with the whole model. Raises AutoparError as `Micros.local`."""

    split = _split(candidate, layers)

    def cost(recompute: str) -> Cost:
        return layers.cost(split, candidate.rows, recompute, candidate.halves)

    again = candidate.again
    if again is None:
        return cost(candidate.recompute)
    less = cost(again.less)
    return less.with_again(cost(again.more), again.count, again.layers) if again.count else less


@cache
def _schedule(name: str, ranks: int, count: int, stages: int) -> tuple[Schedule, tuple[Moments, ...]]:
    schedule = parse_schedule(name, ranks, count, stages)
    return schedule, tuple(map(Moments.of, schedule.orders))


def step_us(candidate: Candidate, made: Pipelined, once: Sequence[tuple[float, float]], machine: Machine) -> float:
    """us of a step. once: of each rank, what it does before the first micro-batch and after the last one. Some
    micro-batches are looked at: with each one more a step grows by the time of the slowest rank."""
    flow, costs = _flow(candidate, made, machine)
    actions = [(Action(rank, "P", 0), Action(rank, "E", 0)) for rank in range(candidate.pp)]
    orders = tuple((p, *order, e) for (p, e), order in zip(actions, made.schedule.orders, strict=True))
    ends = {(rank, kind): us for rank, both in enumerate(once) for kind, us in zip("PE", both, strict=True)}
    works = {**flow.works, **dict.fromkeys(ends, Work())}
    times = {**costs.times_us, **ends}
    span = span_us(orders, replace(flow, works=works), replace(costs, times_us=times))
    return span + (candidate.microbatches - made.count) * max(rank.micro_us for rank in made.ranks)


def pipeline_of(candidate: Candidate, layers: Layers, machine: Machine) -> tuple[Timeline, int]:
    """When each rank of a candidate's pipeline does what in the first micro-batches, and how many these are."""
    made = pipelined(candidate, layers)
    flow, costs = _flow(candidate, made, machine)
    return simulate(with_transfers(made.schedule.orders, flow, costs), flow, costs), made.count


def _flow(candidate: Candidate, made: Pipelined, machine: Machine) -> tuple[Flow, Costs]:
    """What flows between the actions of the first micro-batches, and what they take."""
    message = int(made.stages[0].cost.message)
    works: dict[tuple[int, str], Work] = {}
    types: dict[str, TensorType] = {}
    for s, kind, work in _chain(len(made.stages), candidate.halves):
        works[s, kind] = work
        types |= dict.fromkeys((*work.reads, *work.writes), TensorType((message,), torch.uint8))
    line = machine.message_line(group_of(Mesh(candidate.axes), PIPELINE, machine.ranks))
    return Flow(made.schedule.ranks, made.count, works, types), Costs(made.times(candidate.halves), *line)


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
