"""Which queries see which keys of a mask that is known by a condition, block by block.

The least and the largest element that each vector has in a block tell of most blocks that all their keys are seen, or
none: for two documents `c0==r0` of [1, 1] and [2, 2] holds nowhere. Only of the others is the mask made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.comparisons import All, BoolVector, Comparison, Condition, every, holds, parse_condition
from autopar.runtime.attention.blocks import Block, RowRuns, Tensor, take
from autopar.runtime.kernels import host

PARTLY, NONE, SEEN = 0, 1, 2  # of the keys of a block are seen
# Rows and columns of a block. On a GPU a decision stops the queue, so that short sequences go without.
_SIZE_CPU, _SIZE = 256, 1024
Decide = Callable[[Tensor], list[list[list[int]]]]  # reads the codes [samples, blocks of queries, blocks of keys]


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """What an attention under a condition is told beside its operands: see `ir/ops/compared.py`."""

    rows: Sequence[Tensor]
    columns: Sequence[Tensor]
    compare: str
    causal: bool
    scale: float
    starts: Sequence[int] = ()
    reach: int | None = None


def decided(codes: Tensor) -> list[list[list[int]]]:
    """The codes as they are; while a CUDA graph is recorded, which cannot wait for them, of no block anything."""
    if not host.on_host(codes) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return undecided(codes)
    found: list[list[list[int]]] = codes.tolist()
    return found


def undecided(codes: Tensor) -> list[list[list[int]]]:
    """Say of no block anything: the mask of each is made."""
    samples, rows, columns = codes.shape
    return [[[PARTLY] * columns] * rows] * samples


@dataclass(frozen=True, slots=True)
class Mask:
    """A condition with its vectors, rows as [b|1, h|1, s|1, 1] and columns as [b|1, h|1, 1, t|1]; runs: of queries."""

    condition: Condition
    vectors: Mapping[str, Tensor]
    s: int
    t: int
    runs: RowRuns

    @staticmethod
    def of(q: Tensor, k: Tensor, call: ComparedCall) -> Mask:
        """The mask of a call; what is causal in it is one more comparison."""
        return Mask.within(q.shape[2], k.shape[2], call, "<=" if call.causal else "", q.device)

    @staticmethod
    def within(s: int, t: int, call: ComparedCall, sign: str, device: torch.device) -> Mask:
        """The mask of s queries and t keys; with a sign, of those keys at positions `sign` that of the query."""
        condition = parse_condition(call.compare)
        vectors = {f"r{i}": row.unsqueeze(-1) for i, row in enumerate(call.rows)}
        # of a slice of a sequence the keys behind it are not there, and no query of it would see them
        vectors |= {f"c{i}": column[..., :t].unsqueeze(-2) for i, column in enumerate(call.columns)}
        runs = RowRuns.of(call.starts, s)
        if sign:
            row, column = f"r{len(call.rows)}", f"c{len(call.columns)}"
            condition = every(condition, Comparison(column, sign, row))
            places = [torch.arange(start, start + runs.width, device=device) for start in runs.starts]
            vectors[row] = torch.cat(places).view(1, 1, s, 1)
            vectors[column] = torch.arange(t, device=device).view(1, 1, 1, t)
        return Mask(condition, vectors, s, t, runs)

    def part(self, sample: int | None, rows: slice, keys: Sequence[slice]) -> Tensor:
        """The mask of some queries and keys as a tensor: True where a key is seen."""
        found = holds(self.condition, {name: self._taken(name, sample, rows, keys) for name in self.vectors})
        assert found is not None
        return found.expand(*found.shape[:2], rows.stop - rows.start, sum(one.stop - one.start for one in keys))

    def _taken(self, name: str, sample: int | None, rows: slice, keys: Sequence[slice]) -> Tensor:
        vector = self.vectors[name]
        vector = vector[sample : sample + 1] if sample is not None and vector.shape[0] > 1 else vector
        if name.startswith("r"):
            return vector[:, :, rows] if vector.shape[2] > 1 else vector
        return take(vector, keys, 3) if vector.shape[3] > 1 else vector

    def blocks(self, like: Tensor, decide: Decide) -> Iterator[Block]:
        """The blocks, sample by sample where the samples differ: of queries those keys that all of them see, and then
        those that some do, with the mask of these."""
        size = _SIZE_CPU if host.on_host(like) else _SIZE
        tall, wide = _step(self.runs.width, size), _step(self.t, size)
        rows = [one for run, _ in self.runs.places() for one in _pieces(run, tall)]
        keys = _pieces(slice(0, self.t), wide)
        count = max(vector.shape[0] for vector in self.vectors.values())
        if not (rows and keys):
            return
        if len(rows) * len(keys) == 1:
            codes = [[[PARTLY]]] * count
        else:
            codes = decide(self._codes(tall, wide).expand(count, len(rows), len(keys)))
        for at, of_rows in enumerate(codes):
            sample = at if count > 1 else None
            for here, its in zip(rows, of_rows, strict=True):
                if seen := _merged(keys, its, SEEN):
                    yield Block(here, seen, sample=sample)
                if partly := _merged(keys, its, PARTLY):
                    yield Block(here, partly, mask=self.part(sample, here, partly), sample=sample)

    def _codes(self, rows: int, columns: int) -> Tensor:
        """How many keys are seen in each block of `rows` queries of a run and `columns` keys."""
        low, high = {}, {}
        for name, vector in self.vectors.items():
            is_row = name.startswith("r")
            flat = vector.flatten(2).expand(-1, -1, self.s if is_row else self.t)
            apart = _apart(flat, self.runs.width if is_row else self.t, rows if is_row else columns)
            shape = (vector.shape[0], -1, 1) if is_row else (vector.shape[0], 1, -1)
            low[name], high[name] = apart.amin((1, -1)).reshape(shape), apart.amax((1, -1)).reshape(shape)
        surely, possibly = bounds(self.condition, low, high)
        return surely * SEEN + ~possibly * NONE


def bounds(condition: Condition, low: Mapping[str, Tensor], high: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(surely, possibly): whether a condition holds for all, and for any, of the elements between two bounds."""
    match condition:
        case Comparison(column, sign, row):
            return _compared((low[column], high[column]), sign, (low[row], high[row]))
        case BoolVector(name, is_true):
            return (low[name], high[name]) if is_true else (~high[name], ~low[name])
    parts = [bounds(part, low, high) for part in condition.parts]
    surely, possibly = parts[0]
    for other_surely, other_possibly in parts[1:]:
        if isinstance(condition, All):
            surely, possibly = surely & other_surely, possibly & other_possibly
        else:
            surely, possibly = surely | other_surely, possibly | other_possibly
    return surely, possibly


def _compared(column: tuple[Tensor, Tensor], sign: str, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (c_low, c_high), (r_low, r_high) = column, row
    match sign:
        case "<":
            return c_high < r_low, c_low < r_high
        case "<=":
            return c_high <= r_low, c_low <= r_high
        case ">" | ">=":
            return _compared(row, "<" if sign == ">" else "<=", column)
    surely, possibly = (c_low == r_high) & (c_high == r_low), (c_low <= r_high) & (c_high >= r_low)
    return (surely, possibly) if sign == "==" else (~possibly, ~surely)


def _step(length: int, size: int) -> int:
    """The length of pieces of at most `size`, as equal as can be, but for the last."""
    return max(1, -(-length // max(1, -(-length // size))))


def _pieces(whole: slice, step: int) -> list[slice]:
    return [slice(first, min(first + step, whole.stop)) for first in range(whole.start, whole.stop, step)]


def _apart(x: Tensor, width: int, size: int) -> Tensor:
    """[b, h, runs * blocks, size] of the last dim: the last block of a run filled up with the run's last element."""
    runs = x.unflatten(-1, (-1, width))
    more = -width % size
    if more:
        runs = torch.cat([runs, runs[..., -1:].expand(*runs.shape[:-1], more)], -1)
    return runs.unflatten(-1, (-1, size)).flatten(2, 3)


def _merged(keys: Sequence[slice], codes: Sequence[int], wanted: int) -> tuple[slice, ...]:
    """The blocks of keys with the code that is wanted; neighbours as one."""
    merged: list[slice] = []
    for one, code in zip(keys, codes, strict=True):
        if code == wanted and merged and merged[-1].stop == one.start:
            merged[-1] = slice(merged[-1].start, one.stop)
        elif code == wanted:
            merged.append(one)
    return tuple(merged)
