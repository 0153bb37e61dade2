"""How a kernel's domain is cut into tiles: by its shape and a budget of registers, with no trials.

A thread holds at most 16 elements of a row's values (8 of float64), for which a norm's backward pass with its residual
takes 75 registers on an H100; a row of more than 16,384 elements goes through a loop instead. A program of an
element-wise kernel takes 2,048 elements: 16 for each thread of four warps, so that several loads of 16 bytes are on
their way; 1,024 if it has more than eight operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autopar.runtime.triton.lowering.lower import LoweredGroup

LONGEST_ROW = 16_384  # elements that a program holds in registers
_LOOP_COLUMNS = 4096
_SHORT_ROW = 2048  # of which a thread holds half as much, beside the sums over rows
_ELEMENTS, _PER_THREAD, _MANY_OPERANDS = 2048, 16, 8
_WIDEST_TILE = 1024  # columns of an element-wise tile
_WARPS_AT_ONCE = 16
_CPU_PROGRAMS = 3  # in the interpreter: few, and odd, so that tests see several


@dataclass(frozen=True, slots=True)
class Tile:
    """rows, columns: of a tile. across: tiles beside each other in a row. warps: of a program. is_looped: a program
    goes over its rows tile by tile. is_persistent: a program goes over many tiles of rows and sums them up."""

    rows: int
    columns: int
    across: int
    warps: int
    is_looped: bool
    is_persistent: bool

    @property
    def keeps(self) -> bool:
        """Whether registers are left for what all rows of a persistent kernel read: weights."""
        return self.rows * self.columns <= 32 * self.warps * _PER_THREAD


def tile_of(lowered: LoweredGroup) -> Tile:
    """The tile of a kernel."""
    width, has_rows = lowered.width, bool(lowered.reductions)
    padded = _power_of_two(width)
    domain = lowered.rows * width
    is_double = any(v.dtype == torch.float64 and math.prod(v.shape) >= domain for v in lowered.values())
    per_thread = _PER_THREAD // 2 if is_double else _PER_THREAD
    if has_rows and padded > LONGEST_ROW:
        return Tile(1, _LOOP_COLUMNS, 1, _warps(_LOOP_COLUMNS, per_thread), True, lowered.has_columns)
    if has_rows:
        rows = max(1, _ELEMENTS // 2 // padded)
        if lowered.has_columns and padded <= _SHORT_ROW:
            per_thread //= 2
        return Tile(rows, padded, 1, _warps(rows * padded, per_thread), False, lowered.has_columns)
    columns = _columns(width)
    elements = _ELEMENTS if len(lowered.operands) <= _MANY_OPERANDS else _ELEMENTS // 2
    return Tile(max(1, elements // columns), columns, -(-width // columns), 4, False, lowered.has_columns)


def processors_of(device: torch.device) -> int | None:
    """The multiprocessors of a GPU; None for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None


def programs_of(tile: Tile, rows: int, processors: int | None) -> int:
    """How many programs share the tiles of rows. Those that sum are as many as run at once with 128 registers a thread:
    a processor has room for 16 warps of these. processors: of the GPU; None in the interpreter."""
    tiles = -(-rows // tile.rows)
    if not tile.is_persistent:
        return tiles * tile.across
    if processors is None:
        return min(tiles, _CPU_PROGRAMS)
    return min(tiles, max(1, processors * (_WARPS_AT_ONCE // tile.warps) // tile.across))


def _columns(width: int) -> int:
    """A row as one tile, if at most a third lies beyond it; else the widest power of two with at most an eighth."""
    whole = _power_of_two(width)
    if whole <= _WIDEST_TILE and 3 * (whole - width) <= width:
        return whole
    sizes = (1024, 512, 256, 128, 64, 32)
    return next((size for size in sizes if -width % size * 8 <= width), min(whole, _WIDEST_TILE))


def _warps(elements: int, per_thread: int) -> int:
    return min(16, max(4, elements // (32 * per_thread)))


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
