"""The step of a candidate, from what a micro-batch costs on a stage: pipeline, data axes, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.machines import Machine
from autopar.planning.candidates import Candidate
from autopar.planning.data_time import data_us
from autopar.planning.layers import Cost
from autopar.planning.pipelined import bubble_us, busy_us, held_at_once, stages_of
from autopar.planning.rank_memory import rank_bytes
from autopar.planning.step_time import ADAMW


@dataclass(frozen=True, slots=True)
class Prediction:
    """us, and bytes of the fullest rank. bubble, exposed, data: the parts that are idle in the pipeline, that wait for
    tp and cp, and for the data axes."""

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
    stages = stages_of(candidate, cost, layers)
    data = data_us(candidate, cost, stages, machine)
    own = max(cost.parameters(n) if i == len(stages) - 1 else n * cost.parameters.each for i, n in enumerate(stages))
    optimizer = machine.memory_us(max(1.0, ADAMW * own / candidate.shards))
    once = cost.once.outside + max(stages) * cost.once.each
    exposed = cost.exposed(sum(stages)) / len(stages) * candidate.microbatches
    flight = held_at_once(candidate)
    memory = max(rank_bytes(candidate, cost, n, i, len(stages), flight) for i, n in enumerate(stages))
    busy = busy_us(cost, stages)
    most = candidate.microbatches * max(f + b for f, b in busy)
    beside = once + data + optimizer
    bubble = bubble_us(candidate, cost, busy, machine) if most + beside < slowest else 0.0
    return Prediction(candidate, most + bubble + beside, memory, bubble, exposed, data, optimizer)
