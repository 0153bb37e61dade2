"""The step of a candidate, from what a micro-batch costs on a stage: pipeline, data axes, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.machines import Machine
from autopar.machines.model import ADAMW
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import Stage, data_of, pipelined, step_us
from autopar.planning.price.rank_memory import rank_bytes
from autopar.planning.space.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Prediction:
    """us, and bytes of the fullest rank. bubble, exposed, data: the parts that are idle in the pipeline, that wait for
    tp and cp, and for the data axes. is_emitted: True if these are of the emitted programs (report/emitted.py)."""

    candidate: Candidate
    total: float
    memory: float
    bubble: float
    exposed: float
    data: float
    optimizer: float
    is_emitted: bool = False


def predict(
    candidate: Candidate, layers: Layers, machine: Machine, slowest: float = math.inf, limit: float = math.inf
) -> Prediction:
    """The time and the memory of a step. slowest, limit: us, and bytes, from which on nobody asks how much more it is:
    then no schedule is simulated, and the time of a pipeline is that without a bubble, or infinite if it does not fit.
    Raises AutoparError as `Micros.local`."""
    made = pipelined(candidate, layers)
    memory = max(rank_bytes(candidate, made, i) for i in range(candidate.pp))
    if candidate.pp > 1 and memory > limit:
        return Prediction(candidate, math.inf, memory, 0.0, 0.0, 0.0, 0.0)
    ranks = [_beside(candidate, layers, rank, machine) for rank in made.ranks]
    m = candidate.microbatches
    floors = [m * rank.micro_us + sum(beside) for rank, beside in zip(made.ranks, ranks, strict=True)]
    most = max(floors)
    last = floors.index(most)
    rank, (before, after, optimizer) = made.ranks[last], ranks[last]
    data = before + after - rank.cost.once(rank.share.time.layers) + m * rank.moved_us
    exposed = m * rank.cost.exposed(rank.share.time.layers)
    total = most
    if candidate.pp > 1 and most < slowest:
        total = step_us(candidate, made, [(before, after + optimizer) for before, after, optimizer in ranks], machine)
    return Prediction(candidate, total, memory, total - most, exposed, max(0.0, data), optimizer)


def _beside(candidate: Candidate, layers: Layers, rank: Stage, machine: Machine) -> tuple[float, float, float]:
    """us of a rank before its first micro-batch, behind the last one, and of the optimizer."""
    stored, cost = rank.share.stored.layers, rank.cost
    optimizer = machine.update_us(ADAMW * cost.trained(stored) / candidate.shards)
    once = cost.once(rank.share.time.layers)
    if rank.step is not None:
        return rank.step.before, rank.step.after, optimizer
    data = data_of(candidate, layers)
    place = candidate.split.near, candidate.recompute, candidate.chunks, rank.share
    key = "once", *place, once, candidate.zero, candidate.gathers_again, data.groups
    before, after = layers.kept(
        key, lambda: tuple(moving.streams.device for moving in (data.first(rank.slots, once), data.last(rank.slots)))
    )
    return before, after, optimizer
