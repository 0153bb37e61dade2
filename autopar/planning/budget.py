"""How many layers are computed again: as few as the memory of a device allows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from autopar.planning.candidates import Candidate
from autopar.planning.layers import Layers
from autopar.planning.pipelined import pipelined
from autopar.planning.rank_memory import rank_bytes


def with_fewest(candidate: Candidate, layers: Layers, limit: float) -> Candidate | None:
    """The candidate with the fewest layers computed again that leave at most `limit` bytes on a rank, or, where no
    number of them does, with those that leave least; itself if it does not compute some layers again, and others not.
    None if it fits with none computed again. Raises AutoparError as `Micros.local`.

    With each layer less is saved, until what the last ones need at once, with what enters all of them, is most.
    """
    again = candidate.again
    if again is None:
        return candidate

    def with_count(count: int) -> Candidate:
        return replace(candidate, again=replace(again, count=count))

    def bytes_(count: int) -> float:
        made = with_count(count)
        return rank_bytes(made, pipelined(made, layers), 0)

    def is_enough(count: int) -> bool:
        held = bytes_(count)
        return held <= limit or bytes_(count + 1) >= held

    if bytes_(0) <= limit:
        return None
    return with_count(1 + bisect_left(range(1, again.layers - 1), True, key=is_enough))
