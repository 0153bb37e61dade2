"""Rows that a mask puts in their places (`h.masked_scatter(mask, rows)`, `h[mask] = rows`), raised to lookups of each
sample in rows of its own.

The n-th place where the mask holds gets the n-th row, whatever sample it is in: a piece of the samples would have to
know how many places those before it have. Where each sample has as many as the rows are to the samples, its rows are
its own, and samples may be split like any others. Whether that is so is a fact of the data: the capture asks for it,
and each step checks it. Where it is not, torch's own op stands, which takes the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class AsksFacts(Protocol):
    """What is needed of the raising mode: whether a fact holds for the example batch, `source` being all it hangs on;
    and how many samples a batch may have."""

    def holds(self, fact: Callable[[], Tensor], source: Tensor) -> bool: ...

    @property
    def sample_counts(self) -> Iterable[int]: ...


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of rows in a tensor, by sample. mask: [samples, places]; width: the elements of a row; count: how many
    rows each sample has."""

    mask: Tensor
    width: int
    count: int

    def is_own(self) -> Tensor:
        """True, as a tensor, if each sample has places for its own rows and no others."""
        return (self.mask.sum(1) == self.count).all()

    def put(self, base: Tensor, rows: Tensor) -> Tensor:
        """The tensor with the rows in their places."""
        samples, places = self.mask.shape
        own = rows.reshape(samples, self.count, self.width)
        number = (self.mask.cumsum(1) - 1).clamp(0, self.count - 1)
        found = own.gather(1, number.unsqueeze(-1).expand(samples, places, self.width))
        flat = base.reshape(samples, places, self.width)
        return torch.where(self.mask.unsqueeze(-1), found, flat).reshape(base.shape)


def _places(mask: Tensor, base: Tensor, rows: Tensor, counts: Iterable[int]) -> Iterable[_Places]:
    """The ways to read a mask as places of rows by sample. The dims along which it says the same make up a row."""
    whole = mask.expand(base.shape)
    same = base.ndim
    while same and (whole.stride(same - 1) == 0 or base.shape[same - 1] == 1):
        same -= 1
    width, places = math.prod(base.shape[same:]), math.prod(base.shape[:same])
    by_place = whole.flatten(same)[..., 0] if same < base.ndim else whole
    total, rest = divmod(rows.numel(), max(width, 1))
    for samples in (*base.shape[: 1 if same > 1 else 0], *counts):
        if samples and not (rest or total % samples or places % samples) and 0 < total // samples <= places // samples:
            yield _Places(by_place.reshape(samples, places // samples), width, total // samples)


def _put(facts: AsksFacts, base: Tensor, mask: Tensor, rows: Tensor, ones: int = 0) -> Any:
    """The tensor with rows in the places of a mask; NotImplemented where they are not known to be the samples' own.
    ones: how many dims the mask lacks at its end."""
    spread = mask.reshape((*mask.shape, *[1] * ones))
    for places in _places(spread, base, rows, facts.sample_counts):
        return places.put(base, rows) if facts.holds(places.is_own, mask) else NotImplemented
    return NotImplemented


def _masked_scatter(facts: AsksFacts, input: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Raise torch.masked_scatter."""
    is_plain = mask.dtype == torch.bool and mask.ndim <= input.ndim and input.dtype == source.dtype
    return _put(facts, input, mask, source) if is_plain else NotImplemented


def _index_put(facts: AsksFacts, input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    """Raise torch.index_put by one mask, of a row for each place."""
    mask = indices[0] if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim or accumulate:
        return NotImplemented
    row = input.shape[mask.ndim :]
    if input.shape[: mask.ndim] != mask.shape or input.dtype != values.dtype:
        return NotImplemented
    if values.ndim != 1 + len(row) or values.shape[1:] != row or values.shape[0] == 1:
        return NotImplemented
    return _put(facts, input, mask, values, len(row))


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def raised(facts: AsksFacts, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = function(facts, input, *args, **kwargs)
        return made if made is NotImplemented else input.copy_(made)

    return raised


def _setitem(facts: AsksFacts, input: Tensor, index: Any, value: Any) -> Any:
    """Raise `input[mask] = rows`, also of another dtype. None of the results of torch's own is NotImplemented."""
    if not isinstance(value, Tensor):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items[1:]):
        return NotImplemented
    made = _index_put(facts, input, items[:1], value.to(input.dtype))
    if made is NotImplemented:
        return made
    input.copy_(made)
    return None


ASKING: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.masked_scatter, Tensor.masked_scatter), _masked_scatter),
    Tensor.masked_scatter_: _in_place(_masked_scatter),
    **dict.fromkeys((torch.index_put, Tensor.index_put), _index_put),
    **dict.fromkeys((torch.index_put_, Tensor.index_put_), _in_place(_index_put)),
    Tensor.__setitem__: _setitem,
}
