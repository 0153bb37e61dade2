"""Which elements of a tensor of counts a number adds up: by two of these a piece of sorted rows begins and ends.

`ends = counts.cumsum(0).tolist()` and `start += n` say the same of `rows[start:end]`: the rows of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class CountSum:
    """The sum of the elements of `tensor` [n] at some places, in their order."""

    tensor: Tensor
    places: tuple[int, ...]
    version: int

    @staticmethod
    def element(tensor: Tensor, place: int) -> CountSum:
        return CountSum(tensor, (place,), tensor._version)

    def is_of(self, other: CountSum) -> bool:
        return self.tensor is other.tensor and self.version == other.version == self.tensor._version


def sum_of(one: Any, other: Any) -> CountSum | None:
    """What the sum of two numbers adds up, where each is a CountSum or 0; None for another sum."""
    if not isinstance(one, CountSum) or not isinstance(other, CountSum):
        spans = [number for number in (one, other) if isinstance(number, CountSum)]
        return spans[0] if spans and any(type(number) is int and number == 0 for number in (one, other)) else None
    if not one.is_of(other) or set(one.places) & set(other.places):
        return None
    return CountSum(one.tensor, tuple(sorted((*one.places, *other.places))), one.version)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one group of several. is_ended: the tensor says where groups end, and not how many rows each has.
    is_next: the rows begin where the group before it ends; else there are groups between, which have to be empty."""

    tensor: Tensor
    place: int
    is_ended: bool
    is_next: bool = True

    def count(self) -> Tensor:
        """How many rows it has."""
        own: Tensor = self.tensor[self.place]
        return own - self.tensor[self.place - 1] if self.is_ended and self.place else own


def piece_between(start: Any, end: Any) -> RowGroup | None:
    """The group whose rows begin and end there; None for other rows. start: a CountSum, or 0 for the first row."""
    if not isinstance(end, CountSum) or not (
        start.is_of(end) if isinstance(start, CountSum) else type(start) is int and start == 0
    ):
        return None
    before, place = start.places if isinstance(start, CountSum) else (), end.places[-1]
    if end.places == (*before, place):
        return RowGroup(end.tensor, place, False, before == tuple(range(place)))
    is_ended = len(before) == len(end.places) == 1 and before[0] < place
    return RowGroup(end.tensor, place, True, before == (place - 1,)) if is_ended else None
