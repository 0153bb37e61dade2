"""The bytes that a rank of a candidate holds at its peak, from what its stages hold and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planning.candidates import Candidate
from autopar.planning.pipelined import Pipelined, Stage

Held = tuple[float, float, float, float, float]  # what `Moments` count


def rank_bytes(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """The bytes of a rank at its peak: in the step, or in the optimizer, which makes one value more of a parameter."""
    own, shards = made.ranks[rank], candidate.shards
    layers, cost = own.share.stored.layers, own.cost
    trained, frozen = cost.trained(layers), cost.frozen(layers)
    part = (trained + cost.states(layers)) / shards + frozen / candidate.frozen_shards
    optimizer = part + (cost.gradients(layers) + trained) / shards
    held = held_of(candidate, made, rank)
    peak = made.moments[rank].most(held)
    if candidate.pp > 1:
        peak = max(peak, _last(held) + _received(made, own) / _parts(candidate))
    copies = _copies(candidate, own, made.stages[-1].cost.lent.outside)
    return max(part + copies + peak, optimizer)


def held_of(candidate: Candidate, made: Pipelined, rank: int) -> list[Held]:
    """Of each stage of a rank."""
    return [_held(candidate, made.stages[stage], _parts(candidate)) for stage in made.moments[rank].stages]


def _parts(candidate: Candidate) -> int:
    """Of which a rank keeps one of each gradient, that is there from the first backward pass of its stage on."""
    return candidate.shards if candidate.zero >= 2 else 1


def _last(held: Sequence[Held]) -> float:
    """Bytes in the last backward pass of a rank, that of its first stage."""
    saved, _, _, others, _ = held[0]
    return saved + others + sum(gradients for _, _, gradients, _, _ in held)


def _received(made: Pipelined, rank: Stage) -> float:
    """Bytes of gradients of tied parameters that a rank which keeps these gets from the last stage."""
    last = made.stages[-1].cost.terms
    is_apart = rank.share.stored.entry > 0 and not rank.share.time.behind
    return last.outside if is_apart else 0.0


def _held(candidate: Candidate, stage: Stage, parts: int) -> Held:
    """Bytes of what `Moments` count. parts: as of `_parts`. Gradients of weights (W) wait for a part of what was saved,
    and for what those of inputs (I) leave to them."""
    cost, kept = stage.cost, stage.share.saved.layers
    gradients = cost.gradients(stage.share.stored.layers) / parts
    if not stage.share.time.entry:  # what the first stage keeps
        gradients += cost.terms.outside / parts
    _, plain = cost.gathered(candidate.zero == 3)
    ahead = plain.entry if candidate.zero and candidate.pp > 1 and not candidate.gathers_again else 0.0
    others = cost.beside(stage.share.time, stage.moved)
    return cost.saved(kept), cost.late(kept) + cost.made(kept), gradients, others, ahead


def _lent(candidate: Candidate, rank: Stage, tied: float) -> float:
    """Bytes that tied parameters take, as they are, beside `plain`, which has them on the last rank: that rank gets
    them without ZeRO too; with it, the first one gathers them for itself."""
    has_first, has_last = rank.share.stored.entry > 0, rank.share.time.behind > 0
    return tied if candidate.pp > 1 and has_first != has_last and has_first == (candidate.zero > 0) else 0.0


def _copies(candidate: Candidate, rank: Stage, tied: float) -> float:
    """Bytes of the parameters as a step reads them: in another dtype, and gathered. With ZeRO-3 what is gathered, and
    gradients on their way; of a pipeline they are counted with its stages, and what is gathered is cast before. tied:
    of tied parameters that are read as they are."""
    cost, layers = rank.cost, rank.share.stored.layers
    if candidate.gathers_again and candidate.pp > 1:
        return cost.copies(layers) / candidate.shards
    if candidate.gathers_again:  # of the layer at work and of the next one
        on_way = max(2 * cost.gradients.each, cost.gradients.outside - cost.gradients.entry)
        return 2 * (cost.copies.each + cost.plain.each) + on_way
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass, so it is gone when the last one begins
        _, plain = cost.gathered(candidate.zero == 3)
        is_gone = candidate.microbatches <= 2 or candidate.pp > 1  # where a pipeline has it, `Moments` say
        gathered = plain(layers) - (plain.entry if is_gone else 0.0)
    return cost.copies(layers) + max(0.0, gathered + _lent(candidate, rank, tied))
