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
    peak = moments.most([_held(made.stages[stage], parts) for stage in moments.stages])
    return max(part + _copies(candidate, own) + peak, optimizer)


def _held(stage: Stage, parts: int) -> tuple[float, float, float, float]:
    """Bytes of what `Moments` count. parts: of which a rank keeps one of each gradient, that is there from the first
    backward pass of its stage on. Gradients of weights (W) wait for a part of what was saved, and for what those of
    inputs (I) leave to them."""
    cost, kept = stage.cost, stage.share.saved.layers
    gradients = cost.gradients(stage.share.stored.layers) / parts
    return cost.saved(kept), cost.late(kept) + cost.made(kept), gradients, _others(stage)


def _others(stage: Stage) -> float:
    """Bytes that are alive beside what is kept, at the worst moment of a stage."""
    share, cost = stage.share.time, stage.cost
    line = cost.others if share.behind else cost.first if share.entry else cost.inner
    return max(0.0, line(share.layers))


def _copies(candidate: Candidate, rank: Stage) -> float:
    """Bytes of the parameters as a step reads them, in another dtype and gathered, and of gradients on their way."""
    cost, layers = rank.cost, rank.share.stored.layers
    on_way = _on_way(candidate, rank)
    if candidate.gathers_again:  # of the layer at work and of the next one
        return 2 * (cost.copies.each + cost.plain.each) + on_way
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass, so it is gone when the last one begins
        gathered = cost.plain(layers) - (cost.plain.entry if candidate.microbatches <= 2 else 0.0)
    return cost.copies(layers) + max(0.0, gathered) + on_way


def _on_way(candidate: Candidate, rank: Stage) -> float:
    """Bytes of the largest gradients that are scattered while a backward pass runs: whole, and as one piece. On a rank
    that has all of the model, other moments hold more."""
    each, outside = rank.cost.gradients.each, rank.cost.gradients.outside
    if candidate.pp > 1:
        return 2 * max(each, outside) if candidate.zero >= 2 else 0.0
    return max(2 * each, outside - rank.cost.gradients.entry) if candidate.gathers_again else 0.0
