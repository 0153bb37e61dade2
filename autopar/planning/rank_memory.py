"""The bytes that a rank of a candidate holds at its peak, from what a micro-batch holds on a stage."""

from __future__ import annotations

from collections.abc import Callable

from autopar.planning.candidates import Candidate
from autopar.planning.layers import Cost, Linear
from autopar.planning.states import MOMENTS


def rank_bytes(candidate: Candidate, cost: Cost, layers: int, place: int, stages: int, flight: list[int]) -> float:
    """The bytes of a rank at its peak: in the step, or in the optimizer, which makes one more value of each parameter.

    What is outside of the equal layers is on the last stage, but for the parameters that are read before them.
    """
    is_last, is_first = place == stages - 1, place == 0
    shards = candidate.shards
    moved = cost.entry.outside * (is_first - is_last)

    def of(line: Linear) -> float:
        return line(layers) if is_last else layers * line.each

    parameters, gradients = of(cost.parameters) + moved, of(cost.gradients) + moved
    part = (parameters + of(cost.states) + moved * MOMENTS) / shards
    optimizer = part + gradients / shards + parameters / shards
    gradients /= shards if candidate.zero >= 2 else 1
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
