"""The bytes that a rank of a candidate holds at its peak, from what its stages hold and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planning.price.pipelined import Pipelined, Stage
from autopar.planning.price.whole_step import StepPeaks
from autopar.planning.space.candidates import Candidate

Held = tuple[float, float, float, float, float]  # what `Moments` count


def rank_bytes(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """The bytes of a rank at its peak: in the step, or in the optimizer, which makes one value more of a parameter."""
    own, shards = made.ranks[rank], candidate.shards
    layers, cost = own.share.stored.layers, own.cost
    trained, frozen = cost.trained(layers), cost.frozen(layers)
    part = (trained + cost.states(layers)) / shards + frozen / candidate.frozen_shards
    optimizer = part + (cost.gradients(layers) + trained) / shards
    if own.step is not None:
        peaks = own.step.peaks
        return max(part + _beside(candidate, own, peaks), part + peaks.once, optimizer)
    held = held_of(candidate, made, rank)
    peak = made.moments[rank].most(held)
    peak = max(peak, _last(held) + _received(made, own) / candidate.parts)
    copies = _copies(candidate, own, made.stages[-1].cost.lent.outside)
    return max(part + copies + peak, optimizer)


def _beside(candidate: Candidate, rank: Stage, peaks: StepPeaks) -> float:
    """Bytes in the passes of a plan without a pipeline, beside what is stored: of a step of several micro-batches with
    what all of them read, and the gradients that they add to."""
    if candidate.microbatches == 1:
        return peaks.forward
    cost, layers = rank.cost, rank.share.stored.layers
    copies, entry = cost.copies(layers) / (candidate.shards if candidate.gathers_again else 1), 0.0
    if candidate.zero and not candidate.gathers_again:
        _, plain = cost.gathered(candidate.zero == 3)
        copies, entry = copies + plain(layers), plain.entry  # that no backward pass reads
    gradients = cost.gradients(layers) / candidate.parts
    earlier = max(peaks.forward, peaks.before) + (gradients if candidate.microbatches > 2 else 0.0)
    return copies + max(max(peaks.forward, peaks.backward) + gradients - entry, earlier)


def held_of(candidate: Candidate, made: Pipelined, rank: int) -> list[Held]:
    """Of each stage of a rank."""
    return [_held(candidate, made.stages[stage], candidate.parts) for stage in made.moments[rank].stages]


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
    ahead = plain.entry if candidate.zero and not candidate.gathers_again else 0.0
    others = cost.beside(stage.share.time, stage.moved)
    return cost.saved(kept), cost.late(kept) + cost.made(kept), gradients, others, ahead


def _lent(candidate: Candidate, rank: Stage, tied: float) -> float:
    """Bytes that tied parameters take, as they are, beside `plain`, which has them on the last rank: that rank gets
    them without ZeRO too; with it, the first one gathers them for itself."""
    has_first, has_last = rank.share.stored.entry > 0, rank.share.time.behind > 0
    return tied if has_first != has_last and has_first == (candidate.zero > 0) else 0.0


def _copies(candidate: Candidate, rank: Stage, tied: float) -> float:
    """Bytes of the parameters as a rank of a pipeline reads them: in another dtype, and gathered. What ZeRO-3 gathers,
    and gradients on their way, are counted with its stages, and what is gathered is cast before. tied: of tied
    parameters that are read as they are."""
    cost, layers = rank.cost, rank.share.stored.layers
    if candidate.gathers_again:
        return cost.copies(layers) / candidate.shards
    gathered = 0.0
    if candidate.zero:  # what enters the layers is read by no backward pass: where a rank has it, `Moments` say
        _, plain = cost.gathered(candidate.zero == 3)
        gathered = plain(layers) - plain.entry
    return cost.copies(layers) + max(0.0, gathered + _lent(candidate, rank, tied))
