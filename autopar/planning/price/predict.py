"""The step of a candidate, from what a micro-batch costs on a stage: pipeline, data axes, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.machines import Machine
from autopar.machines.model import ADAMW
from autopar.planning.price.cost import Cost
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import Pipelined, Stage, data_of, pipelined, step_us, without_messages
from autopar.planning.price.step_time import optimizer_us
from autopar.planning.price.whole_step import StepPeaks
from autopar.planning.shallow.held_bytes import MOMENTS
from autopar.planning.space.candidates import GPIPE, STATES, Candidate
from autopar.runtime.tiers.offloaded_states import PARTS

Held = tuple[float, float, float, float, float]  # what `Moments` count


@dataclass(frozen=True, slots=True)
class Prediction:
    """us, and bytes of the fullest rank. bubble, exposed, data: the parts that are idle in the pipeline, that wait for
    tp and cp, and for the data axes, or the host's memory. is_emitted: True if these are of the emitted programs
    (report/emitted.py). host: bytes of the host's memory, of the rank that takes most; of the disk, if the candidate
    has a folder there."""

    candidate: Candidate
    total: float
    memory: float
    bubble: float
    exposed: float
    data: float
    optimizer: float
    is_emitted: bool = False
    host: float = 0.0


def predict(
    candidate: Candidate, layers: Layers, machine: Machine, slowest: float = math.inf, limit: float = math.inf
) -> Prediction:
    """The time and the memory of a step. slowest, limit: us, and bytes, from which on nobody asks how much more it is:
    then no schedule is simulated, and the time of a pipeline is that of a rank that takes as long, without a bubble, or
    infinite if it does not fit, its memory that of a rank that holds more, or of one without messages, which take long
    to draw. Raises AutoparError as `Micros.local`."""
    made = without_messages(candidate, layers)
    memory = most_bytes(candidate, made, limit)
    if candidate.pp > 1 and memory > limit:
        host = _host_bytes(candidate, made)
        return Prediction(candidate, math.inf, memory, 0.0, 0.0, 0.0, 0.0, host=host)
    step = timed(candidate, layers, machine, slowest)
    if candidate.pp > 1 and step.total <= slowest:
        made = pipelined(candidate, layers)
        memory = most_bytes(candidate, made)
    return replace(step, memory=memory, host=_host_bytes(candidate, made))


def timed(candidate: Candidate, layers: Layers, machine: Machine, slowest: float = math.inf) -> Prediction:
    """Predict the time of a step alone: its memory is not a number. slowest: as of `predict`. Raises AutoparError as
    `Micros.local`."""
    made, m = without_messages(candidate, layers), candidate.microbatches
    ranks, floors = list[tuple[float, float, float]](), list[float]()
    for rank in made.ranks:
        ranks.append(_ends(candidate, layers, rank, machine))
        floors.append(m * rank.micro_us + sum(ranks[-1]))
        if floors[-1] >= slowest:
            break
    most = max(floors)
    last = floors.index(most)
    rank, (before, after, optimizer) = made.ranks[last], ranks[last]
    data = before + after - rank.cost.once(rank.share.time.layers) - _middle(layers, rank) + m * rank.moved_us
    exposed = m * rank.cost.exposed(rank.share.time.layers)
    total = most
    if candidate.pp > 1 and most < slowest:
        once = [(before, after + optimizer) for before, after, optimizer in ranks]
        total = step_us(candidate, made, once, machine, slowest)
    return Prediction(candidate, total, math.nan, total - most, exposed, max(0.0, data), optimizer)


def most_bytes(candidate: Candidate, made: Pipelined, limit: float = math.inf) -> float:
    """The bytes of the fullest rank, or of the first that holds more than `limit`."""
    memory = 0.0
    for rank in range(candidate.pp):
        memory = max(memory, rank_bytes(candidate, made, rank))
        if memory > limit:
            break
    return memory


def _host_bytes(candidate: Candidate, made: Pipelined) -> float:
    """Bytes of the host's memory that the rank takes which takes most."""
    return max(_host_bytes_of(candidate, made, rank) for rank in range(candidate.pp))


def _host_bytes_of(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """Bytes of the host's memory that a rank takes between two steps, and in them."""
    own = made.ranks[rank]
    layers, cost = own.share.stored.layers, own.cost
    states = cost.states(layers) / candidate.shards
    if own.step is not None:
        kept = own.step.waiting
    else:
        waiting = (made.stages[stage].copies for stage in made.moments[rank].stages)
        kept = made.moments[rank].most([(each.waiting if each else 0.0, 0.0, 0.0, 0.0, 0.0) for each in waiting])
    if candidate.is_hosted:
        return kept + states + (cost.parameters(layers) + cost.gradients(layers)) / candidate.shards
    return kept + (states if candidate.offload == STATES else 0.0)


def _ends(candidate: Candidate, layers: Layers, rank: Stage, machine: Machine) -> tuple[float, float, float]:
    """us of a rank before its first micro-batch, with what all wait for between the passes; behind the last one; and of
    the optimizer."""
    stored, cost = rank.share.stored.layers, rank.cost
    optimizer = optimizer_us(
        machine, ADAMW * cost.trained(stored) / candidate.shards, candidate.offload, candidate.size,
        is_on_disk=bool(candidate.folder), in_files=candidate.is_hosted,
    )  # fmt: skip
    once = cost.once(rank.share.time.layers)
    if rank.step is not None:
        return rank.step.before + _middle(layers, rank), rank.step.after, optimizer
    data = data_of(candidate, layers)
    first = rank.slots[0].unit if rank.slots else 0  # where a rank lies in the model counts for nothing
    weights = tuple((one.section, one.unit - first, one.weight.name) for one in rank.slots if one.weight)
    place = candidate.split.near, candidate.recompute, candidate.chunks, weights
    key = "first", once, *place, candidate.zero, candidate.gathers_again, data.groups
    before = layers.kept(key, lambda: data.first(rank.slots, once).streams.device)
    sums = tuple(each.bytes_ for each in data.sums_behind(rank.slots))
    last = "last", sums, candidate.zero > 0, data.is_each, data.groups
    after = layers.kept(last, lambda: data.last(rank.slots).streams.device)
    return before + _middle(layers, rank), after, optimizer


def _middle(layers: Layers, rank: Stage) -> float:
    """us of what the last stage computes between the forward and the backward passes."""
    return rank.whole.middle(layers.equal)


def rank_bytes(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """The bytes of a rank at its peak: the batch and buffers, which every rank is given whole, and what is there beside
    them."""
    rows = candidate.rows * candidate.microbatches * candidate.dp * candidate.fsdp
    return rows * made.row + made.beside + _step_bytes(candidate, made, rank)


def _step_bytes(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """The bytes at the peak of the step, or of the optimizer, which makes one value more of a parameter."""
    own, shards = made.ranks[rank], candidate.shards
    layers, cost = own.share.stored.layers, own.cost
    trained, frozen, gradients = cost.trained(layers), cost.frozen(layers), cost.gradients(layers) / shards
    if candidate.is_hosted:
        return own.step.peaks.forward if own.step is not None else _hosted(candidate, made, rank)
    part, stepping = trained / shards + frozen / candidate.frozen_shards, trained / shards
    if candidate.offload == STATES:
        largest, others = _chunk(cost, layers), cost.trained(layers) / PARTS
        stepping = (largest * (1 + MOMENTS) + others * MOMENTS) / shards  # the states of the next ones come meanwhile
    else:
        part += cost.states(layers) / shards
    optimizer = part + gradients + stepping
    if own.step is not None:
        peaks = own.step.peaks
        return max(part + _beside(candidate, own, peaks), part + peaks.once, optimizer)
    held = held_of(candidate, made, rank)
    peak = made.moments[rank].most(held, cost.message.bytes_)
    peak = max(peak, _last(held) + _received(made, own) / candidate.parts)
    if candidate.schedule == GPIPE:
        waiting = candidate.microbatches * sum(saved for saved, *_ in held)
        peak = max(peak + cost.read(layers), waiting + cost.between(layers))
    copies = _copies(candidate, own, made.stages[-1].cost.lent.outside)
    return max(part + copies + peak, optimizer)


def _hosted(candidate: Candidate, made: Pipelined, rank: int) -> float:
    """Bytes of a rank of a pipeline whose parameters wait in the host's memory: what it saves, with parameters and sums
    of gradients of two layers, or with those of what lies outside of the layers: what is made first, and last."""
    cost, parts = made.ranks[rank].cost, candidate.parts
    weights, sums = cost.parameters, cost.gradients
    both = max if candidate.halves else sum  # gradients of inputs read parameters, those of weights add to sums
    each = 2 * both((weights.each, sums.each / parts)) + cost.copies.each
    behind = both((weights.sections[2], sums.sections[2] / parts)) + cost.copies.sections[2] * candidate.halves
    held = [(saved, late, 0.0, others, ahead) for saved, late, _, others, ahead in held_of(candidate, made, rank)]
    message = made.ranks[rank].cost.message.bytes_
    passing = max(each, behind) + made.moments[rank].most(held, message)
    if not weights.entry:
        return passing
    # The gradient of what is read first is made when all else of its micro-batch has gone.
    whole = max(sums.entry, held[0][3])
    saved = [(saved, late, 0.0, -late if candidate.halves else -saved, ahead) for saved, late, _, _, ahead in held]
    return max(passing, whole + (sums.entry + sums.each) / parts + made.moments[rank].most(saved, message))


def _chunk(cost: Cost, layers: float) -> float:
    """Bytes of the parameters that step at a time while the states of others wait in the host's memory: a part of all,
    or one of those that are no layer's, if that is more."""
    ends = cost.parameters.entry, cost.parameters.outside - cost.parameters.entry
    return max(cost.trained(layers) / PARTS, *ends)


def _beside(candidate: Candidate, rank: Stage, peaks: StepPeaks) -> float:
    """Bytes in the passes of a plan without a pipeline, beside what is stored: of a step of several micro-batches with
    what all of them read, and the gradients that they add to."""
    cost, layers = rank.cost, rank.share.stored.layers
    between = peaks.saved * candidate.microbatches + cost.between(layers)
    if candidate.microbatches == 1:
        return max(peaks.forward, between)
    copies, entry = cost.copies(layers) / (candidate.shards if candidate.gathers_again else 1), 0.0
    if candidate.zero and not candidate.gathers_again:
        _, plain = cost.gathered(candidate.zero == 3)
        copies, entry = copies + plain(layers), plain.entry  # that no backward pass reads
    gradients = cost.gradients(layers) / candidate.parts
    earlier = max(peaks.forward, peaks.before) + (gradients if candidate.microbatches > 2 else 0.0)
    if candidate.schedule == GPIPE:  # of each micro-batch is kept what it saves until it goes back
        others = (candidate.microbatches - 1) * peaks.saved
        second = gradients - peaks.saved if candidate.microbatches > 2 else 0.0
        earlier = max(peaks.forward, peaks.before, peaks.before + second) + others
        return copies + max(max(peaks.backward + gradients - entry, earlier) + cost.read(layers), between)
    return copies + max(max(peaks.forward, peaks.backward) + gradients - entry, earlier)


def held_of(candidate: Candidate, made: Pipelined, rank: int) -> list[Held]:
    """What each stage of a rank holds."""
    return [
        _with_messages(_held(candidate, made.stages[stage], candidate.parts), made, stage)
        for stage in made.moments[rank].stages
    ]


def _with_messages(held: Held, made: Pipelined, stage: int) -> Held:
    """With what a stage gets from other ranks and sends them; what is on its way `Moments` count. Of each micro-batch
    it keeps what came, as far as its backward pass reads it, and not what went: the last of its layers counts that as
    saved, and as let go of when its backward pass begins, where the gradient has come that this one reads."""
    ranks, message = made.schedule.ranks, made.stages[stage].cost.message
    gets = stage > 0 and ranks[stage - 1] != ranks[stage]
    sends = stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]
    saved, late, gradients, others, ahead = held
    return max(0.0, saved + message.kept * gets - message.passed * sends), late, gradients, others, ahead


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
    saved, late = cost.saved(kept), cost.late(kept)
    if stage.copies is not None and saved > 0:
        stays = 1 - stage.copies.waiting / saved
        saved, late, others = stays * saved, stays * late, others + stage.copies.beside
    return saved, late + cost.made(kept), gradients, others, ahead


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
