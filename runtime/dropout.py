"""`autopar::dropout`: the mask is a function of (seed, step, key, index of the element in the whole tensor).

So every rank draws exactly the part of the single-device mask that it needs, in any order, and a recomputed
forward or the backward draws it again: nothing is stored (counter-based RNG, Salmon et al., SC'11).

The hash is two rounds of the "lowbias32" integer mixer (C. Wellons' hash prospector) with 32-bit keys between,
in int32 arithmetic that wraps, which CPUs and GPUs vectorise. Keys come from (seed, step, key) through murmur3's
finaliser. For a tensor of more than 2^32 elements the high half of the index enters the first key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PIECE = 1 << 17  # elements: with less, PyTorch's cost per call outweighs the nearer cache (measured)
_M1, _M2, _M3 = 0x21F0AAAD, 0xD35A2D97, 0x9E3779B1
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dropout(
    x: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """x * keep / (1 - p), where x, read in dims of sizes `local`, is the piece at `offsets` of dims `whole`."""
    if p <= 0 or x.numel() == 0:
        return x.clone()
    if p >= 1:
        return torch.zeros_like(x)
    source = x.contiguous()
    return _dropout(source, seed, key, p, whole, local, offsets, torch.empty_like(source))


def dropout_inplace(
    x: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """As above, written over x if x is contiguous."""
    if not 0 < p < 1 or not x.is_contiguous() or x.numel() == 0:
        return dropout(x, seed, key, p, whole, local, offsets)
    return _dropout(x, seed, key, p, whole, local, offsets, x)


def _dropout(
    source: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int], out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    keys = _keys(seed, key)
    starts, width = _runs(whole, local, offsets, source.device)
    count = starts.shape[0]
    bits = source.dtype.itemsize
    source_runs = source.view(count, width).view(_INTEGER[bits])
    out_runs = out.view(count, width)
    out_bits = out_runs.view(_INTEGER[bits])
    threshold = min(round((1 - p) * 2**31), 2**31 - 1)
    scale = 1 / (1 - p)
    height, length = (_PIECE // width or 1, min(width, _PIECE)) if source.device.type == "cpu" else (count, width)
    hash_ = _Hash.make(keys, threshold, min(length, width), math.prod(whole) > 2**31, source.device)
    for top in range(0, count, height):
        rows = slice(top, min(top + height, count))
        for left in range(0, width, length):
            columns = slice(left, min(left + length, width))
            kept = hash_.keep(starts[rows] + left, columns.stop - left)
            torch.bitwise_and(source_runs[rows, columns], kept.to(_INTEGER[bits]), out=out_bits[rows, columns])
            out_runs[rows, columns].mul_(scale)
    return out


@dataclass(frozen=True, slots=True)
class _Hash:
    """What does not change from piece to piece. The constants are int32 tensors: as numbers, PyTorch would convert
    each of them in each call, which costs more than the piece itself."""

    first: torch.Tensor
    second: torch.Tensor
    threshold: torch.Tensor
    columns: torch.Tensor  # 0, 1, 2, ... in the dtype of the index
    constants: tuple[torch.Tensor, ...]

    @staticmethod
    def make(keys: tuple[Any, Any], threshold: int, width: int, wide: bool, device: torch.device) -> _Hash:
        values = (_signed(_M1), _signed(_M2), _signed(_M3), 16, 0xFFFF, 15, 0x1FFFF, 1, 0x7FFFFFFF, 31, threshold)
        *constants, limit = torch.tensor(values, dtype=torch.int32, device=device).unbind()
        first, second = (torch.as_tensor(key, dtype=torch.int32, device=device) for key in keys)
        columns = torch.arange(width, dtype=torch.int64 if wide else torch.int32, device=device)
        return _Hash(first, second, limit, columns, tuple(constants))

    def keep(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """int32 [rows, width]: -1 (all bits) where an element is kept, 0 where not. `starts`: int64 [rows, 1]."""
        m1, m2, m3, sixteen, low16, fifteen, low17, one, low31, last = self.constants
        columns = self.columns[:width]
        if columns.dtype == torch.int64:
            index = starts + columns
            state = _low(index).add_(_low(index >> 32).mul_(m3)).add_(self.first)
        else:
            state = (starts.to(torch.int32) + self.first) + columns
        scratch = torch.empty_like(state)

        def shift_xor(by: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            """state ^= state >>> by: int32 shifts copy the sign, so the copies are masked away."""
            torch.bitwise_right_shift(state, by, out=scratch)
            return state.bitwise_xor_(scratch.bitwise_and_(mask))

        shift_xor(sixteen, low16).mul_(m1)
        shift_xor(fifteen, low17).mul_(m2).add_(self.second)
        shift_xor(fifteen, low17).mul_(m1)
        shift_xor(fifteen, low17).mul_(m2)
        # The top 31 bits as a number below 2^31, less the threshold: the sign says kept.
        state.bitwise_right_shift_(one).bitwise_and_(low31).sub_(self.threshold)
        return state.bitwise_right_shift_(last)


def _keys(seed: torch.Tensor, key: int) -> tuple[Any, Any]:
    """Two 32-bit keys: numbers on CPU; elsewhere tensors, because reading them would wait for the device."""
    words: list[Any] = seed.tolist() if seed.device.type == "cpu" else list(seed.unbind())
    halves = [half for word in (*words, key) for half in (word & 0xFFFFFFFF, (word >> 32) & 0xFFFFFFFF)]
    found = []
    for state in (0x243F6A88, 0x85A308D3):
        mixed: Any = state
        for half in halves:
            mixed = _mix((mixed * 5 + 0xE6546B64 & 0xFFFFFFFF) ^ half)
        found.append(_signed(mixed) if isinstance(mixed, int) else _low(mixed))
    return found[0], found[1]


def _mix(word: Any) -> Any:
    """murmur3's 32-bit finaliser, on a number below 2^32 held in 64 bits (the products may wrap)."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ (word >> 16)


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _low(word: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 as int32."""
    return (((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _runs(
    whole: Sequence[int], local: Sequence[int], offsets: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The piece as rows of consecutive elements of the whole: where each row starts (int64), and how long all are."""
    width, stride, start, dim = 1, 1, 0, len(whole)
    while dim > 0:
        dim -= 1
        width *= local[dim]
        start += offsets[dim] * stride
        stride *= whole[dim]
        if local[dim] != whole[dim]:
            break
    starts = torch.full((1,), start, dtype=torch.int64, device=device)
    for i in reversed(range(dim)):
        steps = torch.arange(offsets[i], offsets[i] + local[i], dtype=torch.int64, device=device) * stride
        starts = (steps.unsqueeze(1) + starts).flatten()
        stride *= whole[i]
    return starts.unsqueeze(1), width
