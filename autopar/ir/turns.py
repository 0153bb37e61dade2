"""The order in which the ranks of an axis compute the runs of rows that they have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of consecutive rows: the place of the rank that has it, and which of its runs it is."""

    place: int
    run: int


def turns_of(size: int, outer: int, reverse: bool) -> tuple[Turn, ...]:
    """The runs of a dim that lies on `size` ranks as (outer, size, rest), mirrored in every second block if outer is
    negative, from the first row or from the last."""
    turns = [
        Turn(size - 1 - i if outer < 0 and block % 2 else i, block) for block in range(abs(outer)) for i in range(size)
    ]
    return tuple(reversed(turns) if reverse else turns)


def messages(size: int, outer: int) -> int:
    """How often the states go from one rank to another."""
    turns = turns_of(size, outer, reverse=False)
    return sum(one.place != other.place for one, other in pairwise(turns))
