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
    peak = moments.most([_held(candidate, stage, parts) for stage in stages])
    return max(part + _copies(candidate, own) + peak, optimizer)


def _held(candidate: Candidate, stage: Stage, parts: int) -> tuple[float, float, float, float, float]:
    """Bytes of what `Moments` count. parts: of which a rank keeps one of each gradient, that is there from the first
    backward pass of its stage on. Gradients of weights (W) wait for a part of what was saved, and for what those of
    inputs (I) leave to them."""
    cost, kept = stage.cost, stage.share.saved.layers
    gradients = cost.gradients(stage.share.stored.layers) / parts
    ahead = cost.plain.entry if candidate.zero and candidate.pp > 1 and not candidate.gathers_again else 0.0
    return cost.saved(kept), cost.late(kept) + cost.made(kept), gradients, _others(stage), ahead


def _others(stage: Stage) -> float:
    """Bytes that are alive beside what is kept, at the worst moment of a stage."""
    share, cost = stage.share.time, stage.cost
    lines = (cost.first, share.entry), (cost.inner, share.layers), (cost.others, share.behind)
    found = (line(share.layers) + moved for (line, has), moved in zip(lines, stage.moved, strict=True) if has)
    return max(0.0, *found)


def _copies(candidate: Candidate, rank: Stage) -> float:
    """Bytes of the parameters as a step reads them: in another dtype, and gathered. With ZeRO-3 what is gathered, and
    gradients on their way; of a pipeline they are counted with its stages, and what is gathered is cast before."""
    cost, layers = rank.cost, rank.share.stored.layers
    if candidate.gathers_again and candidate.pp > 1:
        return cost.copies(layers) / candidate.shards
    if candidate.gathers_again:  # of the layer at work and of the next one
        on_way = max(2 * cost.gradients.each, cost.gradients.outside - cost.gradients.entry)
        return 2 * (cost.copies.each + cost.plain.each) + on_way
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass, so it is gone when the last one begins
        is_gone = candidate.microbatches <= 2 or candidate.pp > 1  # where a pipeline has it, `Moments` say
        gathered = cost.plain(layers) - (cost.plain.entry if is_gone else 0.0)
    return cost.copies(layers) + max(0.0, gathered)
