"""The counter-based generator on a GPU: dropout in one kernel, and in another the bits that all other draws begin with.

The numbers are those of `counter.py`, bit for bit. A program takes tiles of rows and columns, where a row is a run of
consecutive elements of the whole tensor: what an index costs is paid by the row, what the keys cost by the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from autopar.runtime.kernels.counter import FIRST_KEY, INCREMENT, M1, M2, M3, SECOND_KEY, PieceRuns

_TILE = 2048  # elements: 16 for each thread of four warps, so that several loads of 16 bytes are under way
_PROGRAMS = 4096  # at most: more than fit on any GPU at once
_M1, _M2, _M3, FIRST, SECOND, _INCREMENT = map(tl.constexpr, (M1, M2, M3, FIRST_KEY, SECOND_KEY, INCREMENT))


def dropout(
    source: torch.Tensor, seed: torch.Tensor, key: int, runs: PieceRuns, threshold: int, scale: float, out: torch.Tensor
) -> None:
    """out = scale * source where the upper 31 bits of an element's number are below `threshold`, else 0.

    source, out: contiguous, may be the same. seed: int64 [2].
    """
    arguments, tiles, grid = _launch(runs)
    with torch.cuda.device_of(out):  # a launch of Triton's goes to the current device
        _dropout[grid](source, out, seed, key, 2 * threshold, scale, *arguments, **tiles)


def bits(seed: torch.Tensor, key: int, stream: int, runs: PieceRuns) -> torch.Tensor:
    """int32 [count, width]: 32 random bits for each element, of one of the streams of a key."""
    out = torch.empty(runs.count, runs.width, dtype=torch.int32, device=seed.device)
    arguments, tiles, grid = _launch(runs)
    with torch.cuda.device_of(out):
        _bits[grid](out, seed, key, stream, *arguments, **tiles)
    return out


def _launch(runs: PieceRuns) -> tuple[tuple[Any, ...], Mapping[str, Any], tuple[int]]:
    """Where the elements are, the tiles that they are taken in, and the number of programs.

    A tile has the longest rows of which at most an eighth lies beyond the runs.
    """
    columns = next((c for c in (2048, 1024, 512, 256, 128, 64) if -runs.width % c * 8 <= runs.width), 32)
    rows = _TILE // columns
    programs = min(_PROGRAMS, triton.cdiv(runs.count, rows) * triton.cdiv(runs.width, columns))
    inner = runs.dims[::-1]  # innermost first, as the kernel takes a row's number apart
    sizes, strides = tuple(size for size, _ in inner), tuple(stride for _, stride in inner)
    tiles = {"ROWS": rows, "COLUMNS": columns, "WIDE": runs.wide}
    return (sizes, strides, runs.start, runs.count, runs.width), tiles, (programs,)


@triton.jit(do_not_specialize=["key", "threshold", "start"])
def _dropout(
    source, out, seed, key, threshold, SCALE: tl.constexpr, sizes, strides, start, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first, second = key_of(seed, key, None, FIRST), key_of(seed, key, None, SECOND)
    across = tl.cdiv(width, COLUMNS)
    tile, tiles = tl.program_id(0), tl.cdiv(count, ROWS) * across
    while tile < tiles:
        place, index, inside = _elements(tile, across, sizes, strides, start, count, width, ROWS, COLUMNS, WIDE)
        x = tl.load(source + place, mask=inside)
        wide = x if x.dtype == tl.float64 else x.to(tl.float32)
        scaled = wide * tl.full((1, 1), SCALE, wide.dtype)
        kept = mixed(index, first, second, WIDE) < threshold.to(tl.uint32)
        tl.store(out + place, tl.where(kept, scaled, 0.0).to(x.dtype), mask=inside)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["key", "start"])
def _bits(
    out, seed, key, STREAM: tl.constexpr, sizes, strides, start, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first, second = key_of(seed, key, STREAM, FIRST), key_of(seed, key, STREAM, SECOND)
    across = tl.cdiv(width, COLUMNS)
    tile, tiles = tl.program_id(0), tl.cdiv(count, ROWS) * across
    while tile < tiles:
        place, index, inside = _elements(tile, across, sizes, strides, start, count, width, ROWS, COLUMNS, WIDE)
        tl.store(out + place, mixed(index, first, second, WIDE).to(tl.int32, bitcast=True), mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def _elements(
    tile, across, sizes, strides, start, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Find where a tile's elements lie in the piece, their index in the whole, and whether there are such."""
    row = tile // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    index, rest = row * 0 + start, row
    for dim in tl.static_range(len(sizes)):
        index += rest % sizes[dim] * strides[dim]
        rest = rest // sizes[dim]
    return row * width + column, index + column, (row < count) & (column < width)


@triton.jit
def key_of(seed, key, STREAM: tl.constexpr, START: tl.constexpr):
    """A 32-bit key of (seed, step) in memory, a key and, unless None, a stream: `counter.keys_of`."""
    state = tl.full((), START, tl.uint32)
    state = _word(_word(state, tl.load(seed)), tl.load(seed) >> 32)
    state = _word(_word(state, tl.load(seed + 1)), tl.load(seed + 1) >> 32)
    state = _word(_word(state, key), 0)
    if STREAM is not None:
        state = _word(_word(state, STREAM), 0)
    return state


@triton.jit
def _word(state, word):
    state = (state * 5 + _INCREMENT) ^ tl.cast(word, tl.uint32)
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def mixed(index, first, second, WIDE: tl.constexpr):
    """32 random bits of an index: `Counters.bits`."""
    state = index.to(tl.uint32) + first
    if WIDE:
        state += (index >> 32).to(tl.uint32) * _M3
    state = (state ^ (state >> 16)) * _M1
    state = (state ^ (state >> 15)) * _M2 + second
    state = (state ^ (state >> 15)) * _M1
    return (state ^ (state >> 15)) * _M2
