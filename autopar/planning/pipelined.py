"""The pipeline of a candidate: layers of each rank, its schedule simulated, what it holds at once."""

from __future__ import annotations

import torch

from autopar.ir.measure import group_of
from autopar.ir.mesh import PIPELINE, parse_mesh
from autopar.ir.program import TensorType
from autopar.ir.schedule import Costs, Flow, Timeline, Work
from autopar.machines import Machine
from autopar.passes.schedules.parse import Schedule, parse_schedule
from autopar.passes.schedules.simulate import simulate
from autopar.passes.schedules.span import span_us
from autopar.passes.schedules.transfers import with_transfers
from autopar.planning.candidates import Candidate
from autopar.planning.layers import Cost

ROUNDS = 4  # micro-batches a stage that are simulated: each one more takes as long as the one before


def held_at_once(candidate: Candidate) -> list[int]:
    """The micro-batches of a chunk whose activations each rank of the pipeline holds (arXiv 2104.04473)."""
    p, v, m = candidate.pp, candidate.chunks, candidate.microbatches
    if v == 1:
        return [min(p - i, m) for i in range(p)]
    return [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]


def stages_of(candidate: Candidate, cost: Cost, layers: int) -> list[int]:
    """Layers of each rank, such that the slowest is as fast as can be; what is outside of them is on the last one."""
    count = candidate.pp
    if count == 1:
        return [layers]
    each, outside = cost.forward.each + cost.backward.each, cost.forward.outside + cost.backward.outside
    best = min(
        range(layers // count + 1),
        key=lambda last: max(-(-(layers - last) // (count - 1)) * each, last * each + outside),
    )
    inner, more = divmod(layers - best, count - 1)
    return [inner + (i < more) for i in range(count - 1)] + [best]


def busy_us(cost: Cost, stages: list[int]) -> list[tuple[float, float]]:
    """us of the forward and the backward pass of a micro-batch, by rank."""
    found = [(cost.forward.each * n, cost.backward.each * n) for n in stages]
    forward, backward = found[-1]
    return [*found[:-1], (forward + cost.forward.outside, backward + cost.backward.outside)]


def bubble_us(candidate: Candidate, cost: Cost, busy: list[tuple[float, float]], machine: Machine) -> float:
    """us that a step takes longer than the work of its slowest rank. Some micro-batches are simulated: with each one
    more it grows by that rank's time."""
    if candidate.pp == 1:
        return 0.0
    schedule, flow, costs = _first(candidate, cost, busy, machine)
    return span_us(schedule.orders, flow, costs) - flow.microbatches * max(f + b for f, b in busy)


def pipeline_of(candidate: Candidate, cost: Cost, layers: int, machine: Machine) -> tuple[Timeline, int]:
    """When each rank of a candidate's pipeline does what in the first micro-batches, and how many these are."""
    schedule, flow, costs = _first(candidate, cost, busy_us(cost, stages_of(candidate, cost, layers)), machine)
    return simulate(with_transfers(schedule.orders, flow, costs), flow, costs), flow.microbatches


def _first(
    candidate: Candidate, cost: Cost, busy: list[tuple[float, float]], machine: Machine
) -> tuple[Schedule, Flow, Costs]:
    """The schedule of the first micro-batches, with what flows between its actions and what they take."""
    ranks, chunks = candidate.pp, candidate.chunks
    count = min(candidate.microbatches, ROUNDS * ranks)
    schedule = parse_schedule(candidate.schedule, ranks, count, ranks * chunks)
    times = {(s, kind): busy[rank][i] / chunks for s, rank in enumerate(schedule.ranks) for i, kind in enumerate("FB")}
    costs = Costs(times, *machine.message_line(group_of(parse_mesh(candidate.mesh), PIPELINE, machine.ranks)))
    return schedule, _chain(schedule.ranks, count, int(cost.message)), costs


def _chain(ranks: tuple[int, ...], count: int, message: int) -> Flow:
    """Stages one behind the other, with one value between two of them on the way there and back."""
    last, works, types = len(ranks) - 1, dict[tuple[int, str], Work](), dict[str, TensorType]()
    for s in range(last + 1):
        there = ((f"x{s}",) if s else ()), ((f"x{s + 1}",) if s < last else ())
        back = ((f"g{s + 1}",) if s < last else ()), ((f"g{s}",) if s else ())
        works[s, "F"] = Work(there[0], (*there[1], f"saved{s}"))
        works[s, "B"] = Work((*back[0], f"saved{s}"), back[1])
        types |= dict.fromkeys((f"x{s}", f"g{s}", f"saved{s}"), TensorType((message,), torch.uint8))
    return Flow(ranks, count, works, types)
