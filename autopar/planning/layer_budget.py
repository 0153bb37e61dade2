"""How many layers are computed again: as few as the memory of a device allows; of a pipeline `stage_budget.py` says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopar.machines import Machine
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import cost_of, pipelined
from autopar.planning.price.predict import Prediction, most_bytes, predict
from autopar.planning.space.candidates import Candidate
from autopar.planning.stage_budget import Trials

TRIES, CLOSE = 6, 0.01  # parts of what may wait elsewhere that are tried; of the limit: what leaves less is near
MIXES = (("none", "selective"), ("selective", "full"), ("none", "full"))  # of some layers, and of the others more


def with_fewest(
    candidate: Candidate,
    layers: Layers,
    machine: Machine,
    limit: float,
    slowest: float = math.inf,
    is_last: bool = True,
    least_us: Callable[[str, str], float] = lambda less, more: 0.0,
) -> Candidate | None:
    """The fastest mix of two policies that holds at most `limit` bytes, or, where none is so small, the least one;
    the candidate itself if it has one policy for all layers. None if it fits with nothing computed again. slowest,
    is_last: of a pipeline, as of `Trials.fewest`. least_us: of each mix, of a plan without one: what
    cannot be faster than another one that fits is not tried. Raises AutoparError as `Micros.local`."""
    if candidate.memory:
        return _with_moved(candidate, layers, limit)
    if candidate.again is None:
        return candidate
    if _bytes(candidate, 0, layers) <= limit:
        return None
    found, fastest = list[Prediction](), math.inf
    for less, more in MIXES if candidate.pp > 1 else sorted(MIXES, key=lambda mix: least_us(*mix)):
        mix = candidate._replace(again=replace(candidate.again, less=less, more=more))
        if _bytes(mix, 0, layers) <= limit:
            continue
        if mix.pp > 1:
            found.append(Trials(mix, layers, machine, limit).fewest(min(slowest, fastest), is_last))
        elif least_us(less, more) <= fastest:
            found.append(predict(_fewest(mix, layers, limit), layers, machine))
        fastest = min((made.total for made in found if made.memory <= limit), default=math.inf)
    fitting = [made for made in found if made.memory <= limit]
    best = min(fitting, key=lambda made: made.total) if fitting else min(found, key=lambda made: made.memory)
    return best.candidate


def improved(made: Prediction, layers: Layers, machine: Machine, limit: float) -> Prediction:
    """A plan that was found before it was known how fast others are, with the best layers of the best two policies."""
    again = made.candidate.again
    if again is None or made.candidate.pp == 1:
        return made
    found = with_fewest(made.candidate._replace(again=replace(again, ranges=())), layers, machine, limit)
    others = [] if found is None else [predict(found, layers, machine)]
    return min(made, *others, key=lambda each: (each.memory > limit, each.total))


def least_count(mix: Candidate, layers: Layers, limit: float, saving: float, count: int = 0) -> float:
    """How many layers of a plan without a pipeline compute more again at least, if it is to hold at most `limit` bytes.
    saving: bytes, of each of them at most. count: so many are looked at."""
    over = _bytes(mix, count, layers) - limit
    if over <= 0:
        return count
    return count + math.ceil(over / saving) if saving > 0 else math.inf


def _with_moved(candidate: Candidate, layers: Layers, limit: float) -> Candidate:
    """With as few activations in the host's memory as leave at most `limit` bytes on the device, or, where none do,
    with all that may wait there."""

    def bytes_(part: float) -> float:
        one = candidate._replace(moved=part)
        return most_bytes(one, pipelined(one, layers))

    (low, more), (high, less) = (0.0, bytes_(0.0)), (1.0, math.inf)
    if more <= limit:
        return candidate
    less = bytes_(1.0)
    for _ in range(TRIES if less <= limit else 0):  # false position: with more away a rank holds less
        part = min(low + 1.01 * (high - low) * (more - limit) / (more - less), (low + 3 * high) / 4)
        held = bytes_(part)
        (low, more), (high, less) = ((low, more), (part, held)) if held <= limit else ((part, held), (high, less))
        if limit - less < CLOSE * limit:
            break
    return candidate._replace(moved=high)


def _fewest(mix: Candidate, layers: Layers, limit: float) -> Candidate:
    """The mix with the fewest layers that leaves at most `limit` bytes; where none does, that with all but one. With
    each layer less is saved, until what the last ones need at once, with what enters all of them, is most."""
    assert mix.again is not None
    most, count = mix.again.layers - 1, 0
    cost = cost_of(_with_count(mix, 1), layers)
    assert cost.again is not None
    saving = cost.saved.each - cost.again.saved.each
    while count < (least := least_count(mix, layers, limit, saving, count)) <= most:
        count = int(least)
    return _with_count(mix, int(min(least, most)))


def _bytes(mix: Candidate, count: int, layers: Layers) -> float:
    made = _with_count(mix, count)
    return most_bytes(made, pipelined(made, layers))


def _with_count(mix: Candidate, count: int) -> Candidate:
    assert mix.again is not None
    return mix._replace(again=replace(mix.again, ranges=((0, count),) if count else ()))
