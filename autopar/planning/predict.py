"""The step of a candidate, from what a micro-batch costs on a stage: pipeline, data axes, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.ir.measure import group_of
from autopar.ir.mesh import PIPELINE, parse_mesh
from autopar.ir.program import TensorType
from autopar.ir.schedule import Costs, Flow, Timeline, Work
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.passes.schedules.parse import parse_schedule
from autopar.passes.schedules.simulate import simulate
from autopar.passes.schedules.transfers import with_transfers
from autopar.planning.candidates import Candidate
from autopar.planning.layers import Cost, Linear
from autopar.planning.states import MOMENTS
from autopar.planning.step_time import ADAMW

ROUNDS = 4  # micro-batches a stage that are simulated: each one more takes as long as the one before


@dataclass(frozen=True, slots=True)
class Prediction:
    """us, and bytes of the fullest rank. bubble, exposed, data: the parts that are idle in the pipeline, that wait for
    tp, and for the data axes."""

    candidate: Candidate
    total: float
    memory: float
    bubble: float
    exposed: float
    data: float
    optimizer: float


def predict(candidate: Candidate, cost: Cost, layers: int, machine: Machine, slowest: float = math.inf) -> Prediction:
    """The time and the memory of a step. layers: equal ones of the model. slowest: us from which on nobody asks how
    much slower it is; then no schedule is simulated, and the time is that without a bubble."""
    stages = _stages(candidate, cost, layers)
    data = max(_data(candidate, cost, share, machine) for share in stages)
    own = max(cost.parameters(n) if i == len(stages) - 1 else n * cost.parameters.each for i, n in enumerate(stages))
    optimizer = machine.memory_us(max(1.0, ADAMW * own / (candidate.dp if candidate.zero else 1)))
    once = cost.once.outside + max(stages) * cost.once.each
    exposed = cost.exposed(sum(stages)) / len(stages) * candidate.microbatches
    flight = held_at_once(candidate)
    memory = max(_memory(candidate, cost, n, i, len(stages), flight) for i, n in enumerate(stages))
    busy = _busy(cost, stages)
    most = candidate.microbatches * max(f + b for f, b in busy)
    beside = once + data + optimizer
    bubble = _bubble(candidate, cost, busy, machine) if most + beside < slowest else 0.0
    return Prediction(candidate, most + bubble + beside, memory, bubble, exposed, data, optimizer)


def held_at_once(candidate: Candidate) -> list[int]:
    """The micro-batches of a chunk whose activations each rank of the pipeline holds (arXiv 2104.04473)."""
    p, v, m = candidate.pp, candidate.chunks, candidate.microbatches
    if v == 1:
        return [min(p - i, m) for i in range(p)]
    return [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]


def _stages(candidate: Candidate, cost: Cost, layers: int) -> list[int]:
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


def _busy(cost: Cost, stages: list[int]) -> list[tuple[float, float]]:
    """us of the forward and the backward pass of a micro-batch, by rank."""
    found = [(cost.forward.each * n, cost.backward.each * n) for n in stages]
    forward, backward = found[-1]
    return [*found[:-1], (forward + cost.forward.outside, backward + cost.backward.outside)]


def _bubble(candidate: Candidate, cost: Cost, busy: list[tuple[float, float]], machine: Machine) -> float:
    """us that a step takes longer than the work of its slowest rank. Some micro-batches are simulated: with each one
    more it grows by that rank's time."""
    if candidate.pp == 1:
        return 0.0
    timeline, count = _simulated(candidate, cost, busy, machine)
    return timeline.span_us - count * max(f + b for f, b in busy)


def pipeline_of(candidate: Candidate, cost: Cost, layers: int, machine: Machine) -> tuple[Timeline, int]:
    """When each rank of a candidate's pipeline does what in the first micro-batches, and how many these are."""
    return _simulated(candidate, cost, _busy(cost, _stages(candidate, cost, layers)), machine)


def _simulated(
    candidate: Candidate, cost: Cost, busy: list[tuple[float, float]], machine: Machine
) -> tuple[Timeline, int]:
    ranks, chunks = candidate.pp, candidate.chunks
    count = min(candidate.microbatches, ROUNDS * ranks)
    schedule = parse_schedule(candidate.schedule, ranks, count, ranks * chunks)
    times = {(s, kind): busy[rank][i] / chunks for s, rank in enumerate(schedule.ranks) for i, kind in enumerate("FB")}
    costs = Costs(times, *machine.message_line(group_of(parse_mesh(candidate.mesh), PIPELINE, machine.ranks)))
    flow = _chain(schedule.ranks, count, int(cost.message))
    return simulate(with_transfers(schedule.orders, flow, costs), flow, costs), count


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


def _data(candidate: Candidate, cost: Cost, layers: int, machine: Machine) -> float:
    """What a rank waits for the data axis: sums of gradients once a step, parameters of ZeRO-3 where no product hides
    them."""
    if candidate.dp == 1:
        return 0.0
    group = group_of(parse_mesh(candidate.mesh), "dp", machine.ranks)
    gradients, parameters = cost.gradients(layers), cost.parameters(layers)
    if candidate.zero == 0:
        return machine.collective_us("all_reduce", gradients, group)
    scattered = machine.collective_us("reduce_scatter", gradients, group)
    if candidate.zero == 1:
        return scattered + machine.collective_us("all_gather", parameters, group)
    if candidate.zero == 2:
        return _all(candidate, cost, layers, scattered, machine) + machine.collective_us(
            "all_gather", parameters, group
        )
    gathered = _per_layer("all_gather", cost.parameters.each, layers, group, machine)
    hidden = candidate.microbatches * (cost.forward(layers) + cost.backward(layers))
    moved = candidate.microbatches * 2 * gathered
    return _longer(moved, hidden, machine) + _all(candidate, cost, layers, scattered, machine)


def _longer(moved: float, hidden: float, machine: Machine) -> float:
    """us by which calls of `hidden` us end later for collectives of `moved` us beside them, which have a part of the
    device while they are under way (passes/streams.py)."""
    return max(machine.device.communicating * moved, moved - hidden)


def _all(candidate: Candidate, cost: Cost, layers: int, scattered: float, machine: Machine) -> float:
    """Gradients that each micro-batch scatters, under its backward pass; the last bucket has nothing over it."""
    longer = _longer(scattered, cost.backward(layers), machine)
    return candidate.microbatches * longer + scattered / max(layers, 1)


def _per_layer(kind: str, bytes_: float, layers: int, group: Group, machine: Machine) -> float:
    return max(layers, 1) * machine.collective_us(kind, bytes_, group)


def _memory(candidate: Candidate, cost: Cost, layers: int, place: int, stages: int, flight: list[int]) -> float:
    """The bytes of a rank at its peak: in the step, or in the optimizer, which makes one more value of each parameter.

    What is outside of the equal layers is on the last stage, but for the parameters that are read before them.
    """
    is_last, is_first = place == stages - 1, place == 0
    dp, zero = candidate.dp, candidate.zero
    moved = cost.entry.outside * (is_first - is_last)

    def of(line: Linear) -> float:
        return line(layers) if is_last else layers * line.each

    parameters, gradients = of(cost.parameters) + moved, of(cost.gradients) + moved
    part = (parameters + of(cost.states) + moved * MOMENTS) / (dp if zero else 1)
    optimizer = part + gradients / (dp if zero else 1) + parameters / (dp if zero else 1)
    gradients /= dp if zero >= 2 else 1
    saved = flight[place] * of(cost.saved) / candidate.chunks + max(0.0, cost.others(layers))
    is_one = candidate.microbatches == 1  # then gradients take the place of activations
    step = part + _copies(candidate, cost, of) + (max(saved, gradients) if is_one else saved + gradients)
    return max(step, optimizer)


def _copies(candidate: Candidate, cost: Cost, of: Callable[[Linear], float]) -> float:
    """Bytes of the parameters as a step reads them: in another dtype, and gathered."""
    if candidate.zero == 3:  # of the layer at work and of the next one, and what is largest of gradients on their way
        on_way = max(2 * cost.gradients.each, cost.gradients.outside - cost.entry.outside)
        return 2 * (cost.copies.each + cost.plain.each) + on_way
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass, so it is gone when the last one begins
        gathered = of(cost.plain) - (cost.entry.outside if candidate.microbatches <= 2 else 0.0)
    return of(cost.copies) + max(0.0, gathered)
