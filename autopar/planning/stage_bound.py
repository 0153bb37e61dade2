"""What the memory of a pipeline's ranks allows, wherever its cuts lie: how many layers there may be at most, and how
many compute more again at least."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.planning.price.cost import Cost
from autopar.planning.price.pipelined import COLUMNS, GRADIENTS, SAVED, Moments, schedule_of
from autopar.planning.space.candidates import NOTHING, Candidate
from autopar.planning.space.deal import Section


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer takes on a rank: us of a micro-batch, bytes that a micro-batch under way keeps of it, and what both
    become if it computes more again (longer, less). held: bytes that are stored; summed: of its gradients. passed:
    bytes of a micro-batch that lie with the next stage, for the first stage and for others (`LayerMessage`)."""

    us: float
    longer: float
    saved: float
    less: float
    held: float
    summed: float
    passed: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, candidate: Candidate, less: Cost, longer: float, saving: float) -> LayerCost:
        """less: of the policy of most layers. What is stored is that of `rank_bytes`, at least."""
        frozen, shards = less.frozen.each, candidate.shards
        states = less.states.each if candidate.offload == NOTHING else 0.0
        held = (less.parameters.each - frozen + states) / shards + frozen / candidate.frozen_shards
        if candidate.gathers_again:
            held += less.copies.each / shards
        else:
            held += less.copies.each + (less.gathered(candidate.zero == 3)[1].each if candidate.zero else 0.0)
        summed = less.gradients.each / (shards if candidate.zero >= 2 else 1)
        us, message = less.forward.each + less.backward.each, less.message
        passed = message.passed, max(0.0, message.passed - message.kept)
        return cls(us, max(0.0, longer), less.saved.each, saving, held, summed, passed)


def least_again(
    candidate: Candidate, layer: LayerCost, layers: int, apart: float, limit: float, most_us: float
) -> float:
    """How many of so many layers compute more again at least, where no rank holds more than `limit` bytes or takes
    longer than `most_us` for a micro-batch; inf if it cannot be. apart: how much of a layer a stage may have more of
    its time than of its bytes.

    A rank with x layers, y of which compute more again, takes x us + y longer, and holds x (held + f saved) - y f less
    with f micro-batches under way. Layers go to ranks that need compute none again as far as these two allow, then to
    those where a layer more asks for the fewest: as in a linear program, so that no cut into whole layers does better.
    """
    free, paid = 0.0, list[tuple[float, float]]()
    _, moments = schedule_of(candidate, candidate.pp * candidate.chunks)
    for rank, (flying, has_gradients) in enumerate(_flying(moments).tolist()):
        each = layer.held + layer.summed * has_gradients + flying * layer.saved
        room = limit + candidate.chunks * (apart * (each + flying * layer.less) + flying * layer.passed[rank > 0])
        without = min(most_us / layer.us, room / each)
        free += without
        gain = flying * layer.less
        if gain <= 0:
            continue
        rate = each / gain  # layers that compute more again for each that is there
        slow = (most_us + layer.longer * room / gain) / (layer.us + layer.longer * rate)
        most = min(most_us / layer.us, slow if layer.longer > 0 else math.inf, room / max(each - gain, 1e-9))
        paid.append((rate, max(0.0, most - without)))
    lacks, again = layers - free, 0.0
    for rate, room in sorted(paid):
        taken = min(max(0.0, lacks), room)
        lacks, again = lacks - taken, again + rate * taken
    return again if lacks <= 1e-6 * layers else math.inf


def most_layers(candidate: Candidate, layer: LayerCost, apart: float, limit: float) -> float:
    """How many layers the ranks hold together at most, each within `limit` bytes, if none computes more again. apart:
    how much of a layer a stage may have more of what is stored than of what is saved, or the other way round."""
    _, moments = schedule_of(candidate, candidate.pp * candidate.chunks)
    flying, has_gradients = _flying(moments).T
    stored, saved = layer.held + layer.summed * has_gradients, flying * layer.saved
    if not (stored + saved).all():
        return math.inf
    passed = flying * np.array(layer.passed)[np.minimum(np.arange(len(flying)), 1)]
    more = candidate.chunks * (apart * np.minimum(stored, saved) + passed)
    return float(((limit + more) / (stored + saved)).sum())


def stored_apart(layer: Section) -> float:
    """How much of a layer a stage may have more of what is stored than of what is saved, or the other way round,
    wherever it is cut."""
    if not layer.saved[-1] or not layer.stored[-1]:
        return 1.0
    differ = layer.saved / layer.saved[-1] - layer.stored / layer.stored[-1]
    return float(differ.max() - differ.min())


def apart(layers: Iterable[Section]) -> float:
    """How much of a layer a stage may have more of its time than of its bytes, by where a layer may be cut."""
    apart = 0.0
    for layer in layers:
        at = layer.places
        for values in (layer.saved, layer.stored):
            if values[-1]:
                differ = layer.time[at] / layer.time[-1] - values[at] / values[-1]
                apart = max(apart, float(max(differ.max(), 0.0) - min(differ.min(), 0.0)))
    return apart


@cache
def _flying(all_: tuple[Moments, ...]) -> np.ndarray:
    """For each rank, how many micro-batches each of its stages has saved at a moment, at least, and 1 if its gradients
    are there then, else 0."""
    found = []
    for moments in all_:
        counts = moments.counts.reshape(len(moments.counts), -1, COLUMNS)
        flying, gradients = counts[:, :, SAVED].min(axis=1), counts[:, :, GRADIENTS].min(axis=1)
        best = max(range(len(counts)), key=lambda i: (flying[i], gradients[i]))
        found.append((flying[best], gradients[best]))
    return np.array(found)
