"""Which queries meet which keys in one call of a kernel: all of some rows with all of some keys, a square with a causal
mask, or rows under a mask of their own. What nobody sees is in no block.

A rank's queries are a few runs of consecutive ones, and so are the keys that it has at one step of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Mask = Tensor | None
Factors = Callable[[Tensor, int, slice], Tensor]
PIECES = 4  # of the keys before a run, in the backward pass: a kernel makes gradients of as many keys as it is given


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a kernel. keys: one after the other. causal: the first row sees the first key, and so on down. mask:
    of these rows and keys."""

    rows: slice
    keys: tuple[slice, ...]
    causal: bool = False
    mask: Mask = None
    sample: int | None = None  # the only one that it is of

    def of_rows(self, *tensors: Tensor) -> Tensors:
        """Views of the rows [b,h,s,..] of tensors."""
        rows = self.rows
        return tuple([x[:, :, rows] for x in (tensors if self.sample is None else self._of_sample(tensors))])

    def of_keys(self, *tensors: Tensor) -> Tensors:
        """The keys of tensors [b,h,t,..]; views if they lie side by side."""
        tensors, keys = tensors if self.sample is None else self._of_sample(tensors), self.keys
        if len(keys) == 1:
            (one,) = keys
            return tuple([x[:, :, one] for x in tensors])
        return tuple([take(x, keys, 2) for x in tensors])

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Add what is of these keys to what is of all."""
        (total,) = (total,) if self.sample is None else self._of_sample((total,))
        pieces = [part] if len(self.keys) == 1 else part.split([one.stop - one.start for one in self.keys], 2)
        for one, piece in zip(self.keys, pieces, strict=True):
            total[:, :, one] += piece

    def _of_sample(self, tensors: Tensors) -> Tensors:
        assert self.sample is not None
        return tuple([x.narrow(0, self.sample, 1) for x in tensors])


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention is told beside its operands.

    mask: broadcasts to [b,h,s,t], True = may be seen, or is added. causal: query i sees keys 0..i. starts: where the
    runs of queries begin in the whole, if they are a piece of it. factors: given the probabilities of some queries, the
    position of the first, and their keys, what they are multiplied by before they meet values.
    """

    mask: Mask
    causal: bool
    scale: float
    starts: Sequence[int] = ()
    factors: Factors | None = None


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Rows in runs of equal length. starts: their positions in the whole, in the order in which a rank has them."""

    starts: tuple[int, ...]
    width: int

    @staticmethod
    def of(starts: Sequence[int], count: int) -> RowRuns:
        """`count` rows, all in one run if no axis splits them."""
        found = tuple(starts) or (0,)
        return RowRuns(found, count // len(found))

    @property
    def all(self) -> slice:
        return slice(0, self.width * len(self.starts))

    def places(self) -> Iterator[tuple[slice, int]]:
        """Where each run lies on the rank, with the position of its first row in the whole."""
        for at, start in enumerate(self.starts):
            yield slice(at * self.width, (at + 1) * self.width), start


def runs_at(place: int, size: int, outer: int, count: int) -> RowRuns:
    """The `count` rows at a place of an axis: of the whole, read as (outer, size, rest), and in every second block
    mirrored if outer is negative."""
    width = count // abs(outer)
    places = (size - 1 - place if outer < 0 and block % 2 else place for block in range(abs(outer)))
    return RowRuns(tuple((block * size + at) * width for block, at in enumerate(places)), width)


@lru_cache(maxsize=256)  # each step asks anew
def blocks_of(rows: RowRuns, keys: RowRuns, causal: bool, pieces: int = 1) -> tuple[Block, ...]:
    """The blocks of some queries and keys. Causal: what no query may see is in none, and what lies side by side is in
    one, so that pieces in the zigzag order are one call a step. pieces: of keys, if they are
    more than rows."""
    if not rows.width or not keys.width:
        return ()
    if not causal or (rows == keys and list(rows.starts) == sorted(rows.starts)):
        return (Block(rows.all, (keys.all,), causal),)
    parts = [
        part for here, row in rows.places() for there, key in keys.places() for part in _of_runs(row, here, key, there)
    ]
    squares = [part for part in parts if part.causal]
    pairs = _joined((part.rows, part.keys[0]) for part in parts if not part.causal)
    pairs = _joined((columns, row) for row, columns in pairs)
    found = sorted([*squares, *(Block(row, (columns,)) for columns, row in pairs)], key=_from_the_top)
    return tuple(part for block in found for part in _cut(block, pieces))


def run_blocks(q: Tensor, k: Tensor, call: AttentionCall, pieces: int = 1) -> Iterator[Block]:
    """The blocks of causal attention of a piece of the queries to all keys. pieces: of the keys before a run, if they
    are many. A mask may hide a row from the keys before its run: with one a run is one block under both masks."""
    rows, t = RowRuns.of(call.starts, q.shape[2]), k.shape[2]
    if call.mask is None:
        yield from blocks_of(rows, RowRuns((0,), t), True, pieces)
        return
    for here, start in rows.places():
        keys = slice(0, min(start + rows.width, t))
        seen = torch.ones(rows.width, keys.stop, dtype=torch.bool, device=q.device).tril_(start)
        mask = part_of(call.mask, here, keys)
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        yield Block(here, (keys,), mask=mask)


def _of_runs(row: int, rows: slice, key: int, keys: slice) -> Iterator[Block]:
    """A run of queries from position `row` on, with a run of keys from `key` on: first the keys that all of them see,
    then a square on the diagonal, and the rows below it. rows, keys: where the runs lie on the rank."""
    height, width = rows.stop - rows.start, keys.stop - keys.start
    diagonal = max(row, key)
    before = min(diagonal, key + width) - key
    if before > 0:
        yield Block(rows, (slice(keys.start, keys.start + before),))
    side = min(row + height, key + width) - diagonal
    if side <= 0:
        return
    top, left = rows.start + diagonal - row, keys.start + diagonal - key
    square = slice(left, left + side)
    yield Block(slice(top, top + side), (square,), causal=True)
    if top + side < rows.stop:
        yield Block(slice(top + side, rows.stop), (square,))


def _joined(pairs: Iterable[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    """Pairs whose first side is the same and whose second ones lie side by side, as one."""
    joined: list[tuple[slice, slice]] = []
    for alike, side in sorted(pairs, key=lambda pair: [(one.start, one.stop) for one in pair]):
        if joined and joined[-1][0] == alike and joined[-1][1].stop == side.start:
            joined[-1] = alike, slice(joined[-1][1].start, side.stop)
        else:
            joined.append((alike, side))
    return joined


def _from_the_top(block: Block) -> tuple[int, bool, int]:
    return block.rows.start, block.causal, block.keys[0].start


def _cut(block: Block, pieces: int) -> Iterator[Block]:
    """A block in pieces of at least as many keys as rows, but for the last; a square is none."""
    (keys,) = block.keys
    step = max(block.rows.stop - block.rows.start, -(-(keys.stop - keys.start) // pieces))
    for first in range(keys.start, keys.stop, step):
        yield Block(block.rows, (slice(first, min(first + step, keys.stop)),), block.causal)


def part_of(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """A block of a mask, each of whose dims may be 1."""
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.ndim > 0 and mask.shape[-1] > 1 else mask


def take(x: Tensor, places: Sequence[slice], dim: int) -> Tensor:
    """The elements of a dim at these places, one after the other."""
    found = [x.narrow(dim, one.start, one.stop - one.start) for one in places]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def wide(x: Tensor) -> torch.dtype:
    """In which blocks are added up: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
