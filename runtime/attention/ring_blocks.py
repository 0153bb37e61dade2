"""Which products a rank computes of its queries and the keys that it has at one step of a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Rows in runs of equal length. starts: their positions in the whole, in the order in which a rank has them."""

    starts: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class RingBlock:
    """One call of a kernel: all of some rows with all of some keys, or a square with its own causal mask."""

    rows: slice
    keys: slice
    causal: bool = False


def runs_at(place: int, size: int, outer: int, count: int) -> RowRuns:
    """The `count` rows at a place of an axis: of the whole, read as (outer, size, rest), and in every second block
    mirrored if outer is negative."""
    width = count // abs(outer)
    places = (size - 1 - place if outer < 0 and block % 2 else place for block in range(abs(outer)))
    return RowRuns(tuple((block * size + at) * width for block, at in enumerate(places)), width)


def blocks_of(rows: RowRuns, keys: RowRuns, causal: bool) -> list[RingBlock]:
    """The calls for some queries and keys. Causal: what no query may see is in none, and what lies side by side is in
    one, so that pieces in the zigzag order are one call a step."""
    if not rows.width or not keys.width:
        return []
    if not causal or (rows == keys and list(rows.starts) == sorted(rows.starts)):
        return [RingBlock(slice(0, rows.width * len(rows.starts)), slice(0, keys.width * len(keys.starts)), causal)]
    parts = [
        part
        for i, first_row in enumerate(rows.starts)
        for j, first_key in enumerate(keys.starts)
        for part in _parts(first_row, rows.width, i * rows.width, first_key, keys.width, j * keys.width)
    ]
    squares = [part for part in parts if part.causal]
    return [*_joined_rows(_joined_keys([part for part in parts if not part.causal])), *squares]


def _parts(row: int, height: int, rows_at: int, key: int, width: int, keys_at: int) -> Iterator[RingBlock]:
    """A run of queries from position `row` on, with a run of keys from `key` on: first the keys that all of them see,
    then a square on the diagonal, and the rows below it. rows_at, keys_at: where the runs lie on the rank."""
    diagonal = max(row, key)
    before = min(diagonal, key + width) - key
    if before > 0:
        yield RingBlock(slice(rows_at, rows_at + height), slice(keys_at, keys_at + before))
    side = min(row + height, key + width) - diagonal
    if side <= 0:
        return
    top, left = rows_at + diagonal - row, keys_at + diagonal - key
    yield RingBlock(slice(top, top + side), slice(left, left + side), causal=True)
    if top + side < rows_at + height:
        yield RingBlock(slice(top + side, rows_at + height), slice(left, left + side))


def _joined_keys(parts: Sequence[RingBlock]) -> list[RingBlock]:
    """Blocks of the same rows whose keys lie side by side, as one."""
    found: list[RingBlock] = []
    for part in sorted(parts, key=lambda part: (part.rows.start, part.rows.stop, part.keys.start)):
        last = found[-1] if found else None
        if last is not None and last.rows == part.rows and last.keys.stop == part.keys.start:
            found[-1] = RingBlock(part.rows, slice(last.keys.start, part.keys.stop))
        else:
            found.append(part)
    return found


def _joined_rows(parts: Sequence[RingBlock]) -> list[RingBlock]:
    """Blocks of the same keys whose rows lie side by side, as one."""
    found: list[RingBlock] = []
    for part in sorted(parts, key=lambda part: (part.keys.start, part.keys.stop, part.rows.start)):
        last = found[-1] if found else None
        if last is not None and last.keys == part.keys and last.rows.stop == part.rows.start:
            found[-1] = RingBlock(slice(last.rows.start, part.rows.stop), part.keys)
        else:
            found.append(part)
    return found
