"""Which elements of a tensor of counts a number adds up: by two of these a piece of sorted rows begins and ends.

`ends = counts.cumsum(0).tolist()` and `start += n` say the same of `rows[start:end]`: the rows of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The sum of the elements of `tensor` [n] from `start` to before `end`."""

    tensor: Tensor
    start: int
    end: int
    version: int = 0

    @staticmethod
    def element(tensor: Tensor, place: int) -> Span:
        return Span(tensor, place, place + 1, tensor._version)

    def is_of(self, other: Span) -> bool:
        return self.tensor is other.tensor and self.version == other.version == self.tensor._version


def sum_of(one: Any, other: Any) -> Span | None:
    """What the sum of two numbers adds up, where each is a Span or 0; None for another sum."""
    if not isinstance(one, Span) or not isinstance(other, Span):
        spans = [number for number in (one, other) if isinstance(number, Span)]
        return spans[0] if spans and any(type(number) is int and number == 0 for number in (one, other)) else None
    first, last = sorted((one, other), key=lambda span: span.start)
    is_one = first.is_of(last) and first.end == last.start
    return Span(first.tensor, first.start, last.end, first.version) if is_one else None


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one group of several. is_ended: the tensor says where groups end, and not how many rows each has."""

    tensor: Tensor
    place: int
    is_ended: bool

    def count(self) -> Tensor:
        """How many rows it has."""
        own: Tensor = self.tensor[self.place]
        return own - self.tensor[self.place - 1] if self.is_ended and self.place else own


def piece_between(start: Any, end: Any) -> Piece | None:
    """The group whose rows begin and end there; None for other rows. start: a Span, or 0 for the first row."""
    if not isinstance(end, Span) or not (start == 0 if not isinstance(start, Span) else start.is_of(end)):
        return None
    first, last = (start.start, start.end) if isinstance(start, Span) else (0, 0), (end.start, end.end)
    place = end.end - 1
    if last[0] == first[0] == 0 and first[1] == place:
        return Piece(end.tensor, place, False)
    is_next = first == (place - 1, place) and last == (place, place + 1)
    return Piece(end.tensor, place, True) if is_next else None
