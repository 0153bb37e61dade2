"""`autopar::dropout`: a mask of the counter-based generator, applied. Nothing is stored for the backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.runtime.kernels.counter import Counters, PieceRuns, keys_of, number
from autopar.runtime.kernels.gpu_kernels import triton_kernels
from autopar.runtime.kernels.kernel import Kernel

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dropout(
    x: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int], kernels: Any = None,
) -> torch.Tensor:  # fmt: skip
    """x * keep / (1 - p), where x, read in dims of sizes `local`, is the piece at `offsets` of dims `whole`. kernels:
    instead of those of the device (`triton_kernels`)."""
    if p <= 0 or x.numel() == 0:
        return x.clone()
    if p >= 1:
        return torch.zeros_like(x)
    source = x.contiguous()
    return _dropout(source, seed, key, p, whole, local, offsets, torch.empty_like(source), kernels)


def dropout_inplace(
    x: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int], kernels: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Drop elements as `dropout` does, written over x if x is contiguous."""
    if not 0 < p < 1 or not x.is_contiguous() or x.numel() == 0:
        return dropout(x, seed, key, p, whole, local, offsets, kernels)
    return _dropout(x, seed, key, p, whole, local, offsets, x, kernels)


def _dropout(
    source: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int], out: torch.Tensor, kernels: Any,
) -> torch.Tensor:  # fmt: skip
    runs = PieceRuns.of(whole, local, offsets)
    limit, scale = _limit(p)
    kernels = kernels or triton_kernels(source.device)
    if kernels is not None and source.dtype.is_floating_point:
        kernels.dropout(source, seed, key, runs, limit, scale, out)
        return out
    keys = keys_of(seed, key)
    return _masked(source, Counters.of(runs, source.device), lambda rows: keys, limit, scale, out)


def dropout_of_rows(
    x: torch.Tensor, seed: torch.Tensor, key: int, step: int, p: float, place: torch.Tensor, which: torch.Tensor,
    whole: Sequence[int], local: Sequence[int], offsets: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Drop elements of rows as `dropout` does: row i is the one at place[i] of dims `whole`, and its key is that of
    its expert, key + step * which[i]."""
    if p <= 0 or x.numel() == 0:
        return x.clone()
    if p >= 1:
        return torch.zeros_like(x)
    source = x.contiguous()
    one, width = PieceRuns.of(whole[1:], local, offsets), abs(math.prod(whole[1:]))
    runs = replace(one, dims=((len(x), width), *one.dims), wide=whole[0] * width > 2**31)
    starts = (place.unsqueeze(1) * width + Counters.of(one, x.device).starts.view(1, -1)).view(-1, 1)
    words = key + step * which.repeat_interleave(one.count, output_size=runs.count).unsqueeze(1)
    first, second = keys_of(seed, words)
    limit, scale = _limit(p)
    counters = Counters(runs, starts)
    return _masked(source, counters, lambda rows: (first[rows], second[rows]), limit, scale, torch.empty_like(source))


def _masked(
    source: torch.Tensor, counters: Counters, keys: Callable[[slice], tuple[Any, Any]], limit: int, scale: float,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write what is kept. keys: those of some rows of the counters."""
    runs = counters.runs
    shape, integer, device = (runs.count, runs.width), _INTEGER[source.dtype.itemsize], source.device
    source_bits, out_bits = source.view(shape).view(integer), out.view(shape).view(integer)
    threshold = number(limit, device)
    one, low31, last = _numbers(device)
    for block in counters.blocks():
        # The top 31 bits as a number below 2^31, less the threshold: the sign says kept, in all bits of the mask.
        state = counters.bits(keys(block[0]), *block)
        kept = state.bitwise_right_shift_(one).bitwise_and_(low31).sub_(threshold).bitwise_right_shift_(last)
        part, result = (source_bits, out_bits) if kept.shape == shape else (source_bits[block], out_bits[block])
        torch.bitwise_and(part, kept if integer == torch.int32 else kept.to(integer), out=result)
        result.view(out.dtype).mul_(scale)
    return out


def _limit(p: float) -> tuple[int, float]:
    """Kept are the numbers of 31 bits below the limit, times the scale."""
    return min(round((1 - p) * 2**31), 2**31 - 1), 1 / (1 - p)


@functools.cache
def _numbers(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(number(value, device) for value in (1, 0x7FFFFFFF, 31))


# Opaque to a compiler: 32-bit arithmetic wraps, which C++ leaves undefined in the code that Inductor would write.
KERNELS = {
    "dropout": Kernel(dropout, in_place=((0, dropout_inplace),)),
    "dropout_of_rows": Kernel(dropout_of_rows),
}
