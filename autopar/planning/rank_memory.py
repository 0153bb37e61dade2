"""The bytes that a rank of a candidate holds at its peak, from what its stages hold and the order in which they run."""

from __future__ import annotations

from autopar.planning.candidates import Candidate
from autopar.planning.pipelined import Pipelined, Stage


def rank_bytes(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """The bytes of a rank at its peak: in the step, or in the optimizer, which makes one value more of a parameter."""
    own, shards = made.ranks[rank], candidate.shards
    layers, cost = own.share.stored.layers, own.cost
    parameters = cost.parameters(layers)
    part = (parameters + cost.states(layers)) / shards
    optimizer = part + (cost.gradients(layers) + parameters) / shards
    moments, parts = made.moments[rank], shards if candidate.zero >= 2 else 1
    stages = [made.stages[stage] for stage in moments.stages]
    peak = moments.most([_held(stage, parts, _on_way(candidate, stage)) for stage in stages])
    return max(part + _copies(candidate, own) + peak, optimizer)


def _held(stage: Stage, parts: int, on_way: float) -> tuple[float, float, float, float]:
    """Bytes of what `Moments` count. parts: of which a rank keeps one of each gradient, that is there from the first
    backward pass of its stage on. on_way: of gradients that leave. Gradients of weights (W) wait for a part of what was
    saved, and for what those of inputs (I) leave to them."""
    cost, kept = stage.cost, stage.share.saved.layers
    gradients = cost.gradients(stage.share.stored.layers) / parts
    return cost.saved(kept), cost.late(kept) + cost.made(kept), gradients, _others(stage) + on_way


def _others(stage: Stage) -> float:
    """Bytes that are alive beside what is kept, at the worst moment of a stage."""
    share, cost = stage.share.time, stage.cost
    line = cost.others if share.behind else cost.first if share.entry else cost.inner
    return max(0.0, line(share.layers))


def _copies(candidate: Candidate, rank: Stage) -> float:
    """Bytes of the parameters as a step reads them: in another dtype, and gathered; without a pipeline also of
    gradients on their way with ZeRO-3."""
    cost, layers = rank.cost, rank.share.stored.layers
    if candidate.gathers_again:  # of the layer at work and of the next one
        on_way = max(2 * cost.gradients.each, cost.gradients.outside - cost.gradients.entry)
        return 2 * (cost.copies.each + cost.plain.each) + (on_way if candidate.pp == 1 else 0.0)
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass, so it is gone when the last one begins
        gathered = cost.plain(layers) - (cost.plain.entry if candidate.microbatches <= 2 else 0.0)
    return cost.copies(layers) + max(0.0, gathered)


def _on_way(candidate: Candidate, stage: Stage) -> float:
    """Bytes of the gradients that a stage of several has whole while its backward pass scatters them: two of the
    largest (passes/bucket.py), if it has so much."""
    if candidate.pp == 1 or candidate.zero < 2:
        return 0.0
    found = stage.cost.gradients
    return min(2 * max(found.each, found.entry, found.outside - found.entry), found(stage.share.stored.layers))
