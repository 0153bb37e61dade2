"""Results whose size is data (`x[mask]`, `nonzero()`, `unique()`), made by ops of a fixed size once that is known.

The rows are computed in each step: only how many there are is a number of the program. Another batch may have another
number, which is found after its step has run, so that nothing here may fail by it: places beyond are clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
# The number in a tensor of one integer, which was made of `source`.
Count = Callable[[Tensor, Tensor], int]


def places(mask: Tensor, count: Count, source: Tensor | None = None) -> list[Tensor]:
    """Where a mask holds, that was made of `source`: a tensor a dim, in torch's order."""
    at = _places(mask.reshape(-1), count, mask if source is None else source)
    places = []
    for dim, size in enumerate(mask.shape):
        place = at // math.prod(mask.shape[dim + 1 :]) if dim + 1 < mask.ndim else at
        places.append(place % size if dim and size else place)
    return places


def _places(flat: Tensor, count: Count, source: Tensor) -> Tensor:
    """The places of a flat mask: the k-th is where the running number of those so far comes to k."""
    holds = flat != 0
    rows = count(holds.sum(), source)
    ranks = torch.arange(1, rows + 1, device=flat.device)
    return torch.searchsorted(holds.cumsum(0), ranks).clamp(max=max(flat.numel() - 1, 0))


def _where(count: Count, condition: Tensor) -> tuple[Tensor, ...]:
    return tuple(places(condition, count))


def _nonzero(count: Count, input: Tensor, *, as_tuple: bool = False) -> Any:
    found = places(input, count)
    return tuple(found) if as_tuple else torch.stack(found, 1)


def _masked_select(count: Count, input: Tensor, mask: Tensor) -> Tensor:
    input, every = torch.broadcast_tensors(input, mask)
    return input[tuple(places(every, count, mask))]


def _unique(
    count: Count, input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:  # fmt: skip
    if dim is not None:
        return NotImplemented
    values, order = input.detach().reshape(-1).sort(stable=True)
    found, number, counts = _runs(count, values, input)
    inverse = torch.zeros_like(number).index_put((order,), number).reshape(input.shape)
    return _wanted(found, (return_inverse, inverse), (return_counts, counts))


def _unique_consecutive(
    count: Count, input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is not None:
        return NotImplemented
    found, number, counts = _runs(count, input.detach().reshape(-1), input)
    return _wanted(found, (return_inverse, number.reshape(input.shape)), (return_counts, counts))


def _runs(count: Count, values: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of equal neighbours: the value of each, the number of the run of each element, and their lengths."""
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = values[1:] != values[:-1]
    at = _places(is_first, count, source)
    number = is_first.cumsum(0) - 1
    lengths = torch.zeros_like(at).index_add(0, number.clamp(max=max(len(at) - 1, 0)), torch.ones_like(number))
    return values[at], number, lengths


def _wanted(found: Tensor, *more: tuple[bool, Tensor]) -> Any:
    results = (found, *(tensor for is_wanted, tensor in more if is_wanted))
    return results if len(results) > 1 else found


def _bincount(count: Count, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """A negative number, which torch refuses, is another number of bins here."""
    bins = max(minlength, _most(count, input) + 1)
    return _bins(input.clamp(0, bins - 1), weights, bins)


def _least_bins(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Count in as many bins as are asked for: a number beyond them is an error of the step."""
    return _bins(input, weights, minlength) if minlength else NotImplemented


def _bins(input: Tensor, weights: Tensor | None, bins: int) -> Tensor:
    kept = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
    kept = kept if kept.dtype in (torch.int64, torch.float32) else kept.double()
    return torch.zeros(bins, dtype=kept.dtype, device=input.device).index_add(0, input, kept)


def _one_hot(count: Count, tensor: Tensor, num_classes: Any = -1) -> Any:
    if isinstance(num_classes, Tensor) or num_classes != -1:
        return NotImplemented
    classes = torch.arange(_most(count, tensor) + 1, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _most(count: Count, input: Tensor) -> int:
    """The largest of some numbers from 0 on. Raises ValueError where one is less."""
    if not input.numel():
        return -1
    most = count(torch.where(input.min() < 0, -1, input.max()), input)
    if most < 0:
        raise ValueError("a number is negative")
    return most


def _repeat_interleave(
    count: Count, input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    if repeats is None:
        input, repeats = torch.arange(len(input), device=input.device), input
    if not isinstance(repeats, Tensor):
        return NotImplemented
    input, dim = (input.reshape(-1), 0) if dim is None else (input, dim)
    ends = repeats.expand(input.shape[dim]).cumsum(0)
    rows = torch.arange(count(ends[-1], repeats) if output_size is None else output_size, device=input.device)
    place = torch.searchsorted(ends, rows, right=True).clamp(max=max(input.shape[dim] - 1, 0))
    return input.index_select(dim, place)


# By torch function: the same with a `Count` before its arguments, or NotImplemented.
SIZED: Mapping[Any, Callable[..., Any]] = {
    torch.where: _where,
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), _nonzero),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _masked_select),
    **dict.fromkeys((torch.unique, Tensor.unique), _unique),
    **dict.fromkeys((torch.unique_consecutive, Tensor.unique_consecutive), _unique_consecutive),
    **dict.fromkeys((torch.bincount, Tensor.bincount), _bincount),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeat_interleave),
    F.one_hot: _one_hot,
}
# The same where nothing may be taken from the example batch.
UNSIZED: Mapping[Any, Callable[..., Any]] = dict.fromkeys((torch.bincount, Tensor.bincount), _least_bins)
