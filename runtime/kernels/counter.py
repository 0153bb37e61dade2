"""Random bits that are a function of (seed, step, key, index of the element in the whole tensor).

So every rank draws exactly the part of the single-device numbers that it needs, in any order, and a recomputed
forward or the backward draws it again: nothing is stored (counter-based RNG, Salmon et al., SC'11).

The hash is two rounds of the "lowbias32" integer mixer (C. Wellons' hash prospector) with 32-bit keys between,
in int32 arithmetic that wraps, which CPUs and GPUs vectorise. Keys come from (seed, step, key) through murmur3's
finaliser. For a tensor of more than 2^32 elements the high half of the index enters the first key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.runtime.kernels import host

PIECE = 1 << 17  # elements: with less, PyTorch's cost per call outweighs the nearer cache (measured)
_GRAIN = 1 << 15  # elements: with fewer, PyTorch computes on one thread
M1, M2, M3 = 0x21F0AAAD, 0xD35A2D97, 0x9E3779B1
FIRST_KEY, SECOND_KEY, INCREMENT = 0x243F6A88, 0x85A308D3, 0xE6546B64
_U1, _U2, _15, _16 = (np.uint32(value) for value in (M1, M2, 15, 16))


@dataclass(frozen=True, slots=True)
class PieceRuns:
    """A piece of a tensor as rows of `width` consecutive elements of the whole.

    start: where the first row starts. dims: (size, stride in the whole) of the dims over which the rows are spread,
    outermost first. wide: an index may need more than 31 bits.
    """

    start: int
    dims: tuple[tuple[int, int], ...]
    width: int
    wide: bool

    @property
    def count(self) -> int:
        return math.prod(size for size, _ in self.dims)

    @staticmethod
    def of(whole: Sequence[int], local: Sequence[int], offsets: Sequence[int]) -> PieceRuns:
        """The piece of sizes `local` at `offsets` of a tensor of sizes `whole`, with the fewest dims. A negative whole
        size: in every second place of the dim before, the piece of 1 counts its offset from the end. A negative local
        size: of so many places in a row, all of which the dims behind it read together."""
        start, stride, dims = 0, 1, [(1, 1)]

        def add(count: int, spacing: int) -> None:
            inner, last = dims[-1]
            if inner * last == spacing:  # goes on where the inner dim ends, all of which is in the piece
                dims[-1] = (inner * count, last)
            elif count > 1:
                dims.append((count, spacing))

        apart = 0  # two places of the next dim, as the mirrored one behind it has them
        for size, part, offset in zip(reversed(whole), reversed(local), reversed(offsets), strict=True):
            if part < 0:
                stride //= -part
            start += offset * stride
            if part < 0:
                pass
            elif size < 0:
                apart = (-2 * size - 1 - 2 * offset) * stride
            elif apart:
                add(2, apart)
                add(part // 2, 2 * stride)
                apart = 0
            else:
                add(part, stride)
            stride *= abs(size)
        return PieceRuns(start, tuple(reversed(dims[1:])), dims[0][0], abs(math.prod(whole)) > 2**31)


@dataclass(frozen=True, slots=True)
class Counters:
    """The elements of a piece, counted by PyTorch's ops."""

    runs: PieceRuns
    starts: torch.Tensor  # int64 [count, 1]

    @staticmethod
    def of(runs: PieceRuns, device: torch.device) -> Counters:
        starts = torch.full((1,), runs.start, dtype=torch.int64, device=device)
        for size, stride in reversed(runs.dims):
            steps = torch.arange(0, size * stride, stride, dtype=torch.int64, device=device)
            starts = (steps.unsqueeze(1) + starts).flatten()
        return Counters(runs, starts.unsqueeze(1))

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns that stay in cache; all at once off the CPU."""
        count, width = self.runs.count, self.runs.width
        if not host.on_host(self.starts) or count * width <= PIECE:
            yield slice(0, count), slice(0, width)
            return
        height, length = PIECE // width or 1, min(width, PIECE)
        for top in range(0, count, height):
            for left in range(0, width, length):
                yield slice(top, min(top + height, count)), slice(left, min(left + length, width))

    def bits(self, keys: tuple[Any, Any], rows: slice, columns: slice) -> torch.Tensor:
        """int32 [rows, columns]: 32 random bits for each element, in memory of their own. keys: may be [rows, 1]."""
        count = (rows.stop - rows.start) * (columns.stop - columns.start)
        alone = torch.get_num_threads() == 1 or count <= _GRAIN
        if host.on_host(self.starts) and not self.runs.wide and alone and isinstance(keys[0], int):
            return self._bits_of_numpy(keys, rows, columns)
        return self._bits_of_torch(keys, rows, columns)

    def _bits_of_torch(self, keys: tuple[Any, Any], rows: slice, columns: slice) -> torch.Tensor:
        width, device = columns.stop - columns.start, self.starts.device
        m1, m2, m3, sixteen, low16, fifteen, low17 = _constants(device)
        first, second = (_word(key, device) for key in keys)
        places = _places(PIECE if width <= PIECE else width, self.runs.wide, device)[:width]
        starts = self.starts[rows] + columns.start if columns.start else self.starts[rows]
        if self.runs.wide:
            index = starts + places
            state = _low(index).add_(_low(index >> 32).mul_(m3)).add_(first)
        else:
            state = (starts.to(torch.int32) + first) + places
        scratch = torch.empty_like(state)

        def shift_xor(by: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            """state ^= state >>> by: int32 shifts copy the sign, so the copies are masked away."""
            torch.bitwise_right_shift(state, by, out=scratch)
            return state.bitwise_xor_(scratch.bitwise_and_(mask))

        shift_xor(sixteen, low16).mul_(m1)
        shift_xor(fifteen, low17).mul_(m2).add_(second)
        shift_xor(fifteen, low17).mul_(m1)
        return shift_xor(fifteen, low17).mul_(m2)

    def _bits_of_numpy(self, keys: tuple[int, int], rows: slice, columns: slice) -> torch.Tensor:
        """Draw the bits on one thread: numpy shifts unsigned numbers and costs less a call, 1.6 to 4 times in all."""
        width = columns.stop - columns.start
        first, second = (np.uint32(key & 0xFFFFFFFF) for key in keys)
        starts = (self.starts[rows].numpy() + columns.start).astype(np.uint32)
        state = starts + first + _places_of_numpy(max(width, PIECE))[:width]
        scratch = np.empty_like(state)
        for by, factor, added in ((_16, _U1, None), (_15, _U2, second), (_15, _U1, None), (_15, _U2, None)):
            np.bitwise_xor(state, np.right_shift(state, by, out=scratch), out=state)
            np.multiply(state, factor, out=state)
            if added is not None:
                np.add(state, added, out=state)
        return torch.from_numpy(state.view(np.int32))


@functools.lru_cache(256)
def number(value: int, device: torch.device) -> torch.Tensor:
    """An int32 scalar. A Python number PyTorch would convert in each call, which costs more than a small piece."""
    return torch.full((), signed(value), dtype=torch.int32, device=device)


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(number(value, device) for value in (M1, M2, M3, 16, 0xFFFF, 15, 0x1FFFF))


@functools.lru_cache(8)
def _places(width: int, wide: bool, device: torch.device) -> torch.Tensor:
    """0, 1, 2, ... in the dtype of the index."""
    return torch.arange(width, dtype=torch.int64 if wide else torch.int32, device=device)


@functools.lru_cache(2)
def _places_of_numpy(width: int) -> np.ndarray[Any, Any]:
    return np.arange(width, dtype=np.uint32)


def _word(key: Any, device: torch.device) -> torch.Tensor:
    return key if isinstance(key, torch.Tensor) else torch.full((), key, dtype=torch.int32, device=device)


def keys_of(seed: torch.Tensor, *numbers: Any) -> tuple[Any, Any]:
    """Two 32-bit keys: numbers on CPU; elsewhere tensors, because reading them would wait for the device. numbers: may
    be tensors, of a key for each element."""
    if host.on_host(seed):
        return _keys((*seed.tolist(), *numbers))
    return _keys((*seed.unbind(), *numbers))


def _keys(words: Sequence[Any]) -> tuple[Any, Any]:
    halves = [half for word in words for half in (word & 0xFFFFFFFF, (word >> 32) & 0xFFFFFFFF)]
    found = []
    for state in (FIRST_KEY, SECOND_KEY):
        mixed: Any = state
        for half in halves:
            mixed = _mix((mixed * 5 + INCREMENT & 0xFFFFFFFF) ^ half)
        found.append(signed(mixed) if isinstance(mixed, int) else _low(mixed))
    return found[0], found[1]


def _mix(word: Any) -> Any:
    """murmur3's 32-bit finaliser, on a number below 2^32 held in 64 bits (the products may wrap)."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ (word >> 16)


def signed(word: int) -> int:
    """The int32 with the same bits."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _low(word: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 as int32."""
    return (((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
