"""Which queries see which keys of a mask that is known by a condition, block by block.

The least and the largest element that each vector has in a block tell of most blocks that all their keys are seen, or
none: for two documents `c0==r0` of [1, 1] and [2, 2] holds nowhere. Only of the others is the mask made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.comparisons import All, BoolVector, Comparison, Condition, every, holds, parse_condition
from autopar.runtime.attention.attention_runs import runs_of
from autopar.runtime.kernels import host

Tensor = torch.Tensor
PARTLY, NONE, ALL = 0, 1, 2  # of the keys of a block are seen
# Rows and columns of a block. On a GPU a decision stops the queue, so that short sequences go without.
_SIZE_CPU, _SIZE = 256, 1024
Decide = Callable[[Tensor], list[list[list[int]]]]  # reads the codes [samples, blocks of queries, blocks of keys]


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """Some queries, and the keys that they see: all of `seen`, of `partly` those of a mask."""

    samples: slice
    rows: slice
    seen: tuple[slice, ...]
    partly: tuple[slice, ...]


def decided(codes: Tensor) -> list[list[list[int]]]:
    """The codes as they are; while a CUDA graph is recorded, which cannot wait for them, of no block anything."""
    if not host.on_host(codes) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return undecided(codes)
    found: list[list[list[int]]] = codes.tolist()
    return found


def undecided(codes: Tensor) -> list[list[list[int]]]:
    """Of no block anything is known: the mask of each is made."""
    samples, rows, columns = codes.shape
    return [[[PARTLY] * columns] * rows] * samples


@dataclass(frozen=True, slots=True)
class Mask:
    """A condition with its vectors, rows as [b|1, h|1, s|1, 1] and columns as [b|1, h|1, 1, t|1].

    starts: where the runs of the queries begin in the whole.
    """

    condition: Condition
    vectors: Mapping[str, Tensor]
    s: int
    t: int
    starts: tuple[int, ...]

    @staticmethod
    def of(
        q: Tensor, k: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], compare: str, causal: bool,
        starts: Sequence[int],
    ) -> Mask:  # fmt: skip
        """The mask of a call; what is causal in it is one more comparison."""
        condition, s, t = parse_condition(compare), q.shape[2], k.shape[2]
        vectors = {f"r{i}": row.unsqueeze(-1) for i, row in enumerate(rows)}
        # of a slice of a sequence the keys behind it are not there, and no query of it would see them
        vectors |= {f"c{i}": column[..., : k.shape[2]].unsqueeze(-2) for i, column in enumerate(columns)}
        runs = tuple(starts) or (0,)
        if causal:
            row, column = f"r{len(rows)}", f"c{len(columns)}"
            condition = every(condition, Comparison(column, "<=", row))
            vectors[row] = _positions(runs, s, q.device).view(1, 1, s, 1)
            vectors[column] = torch.arange(t, device=q.device).view(1, 1, 1, t)
        return Mask(condition, vectors, s, t, runs)

    def part(self, samples: slice, rows: slice, keys: Sequence[slice]) -> Tensor:
        """The mask of some queries and keys as a tensor: True where a key is seen."""
        found = holds(self.condition, {name: self._taken(name, samples, rows, keys) for name in self.vectors})
        assert found is not None
        return found.expand(*found.shape[:2], rows.stop - rows.start, sum(one.stop - one.start for one in keys))

    def _taken(self, name: str, samples: slice, rows: slice, keys: Sequence[slice]) -> Tensor:
        vector = self.vectors[name]
        vector = vector[samples] if vector.shape[0] > 1 else vector
        if name.startswith("r"):
            return vector[:, :, rows] if vector.shape[2] > 1 else vector
        return take(vector, keys, 3) if vector.shape[3] > 1 else vector

    def blocks(self, like: Tensor, decide: Decide) -> Iterator[MaskBlock]:
        """The blocks of queries, sample by sample where the samples differ."""
        size = _SIZE_CPU if host.on_host(like) else _SIZE
        rows, width, keys = self._rows(size), self.s // len(self.starts), _pieces(0, self.t, size)
        count = max(vector.shape[0] for vector in self.vectors.values())
        if not (rows and keys):
            return
        if len(rows) * len(keys) == 1:
            codes = [[[PARTLY]]] * count
        else:
            found = self._codes(width, -(-width // _count(width, size)), -(-self.t // len(keys)))
            codes = decide(found.expand(count, len(rows), len(keys)))
        for sample, of_rows in enumerate(codes):
            samples = slice(sample, sample + 1) if count > 1 else slice(None)
            for here, its in zip(rows, of_rows, strict=True):
                yield MaskBlock(samples, here, _merged(keys, its, ALL), _merged(keys, its, PARTLY))

    def _rows(self, size: int) -> list[slice]:
        return [one for run, _ in runs_of(self.starts, self.s) for one in _pieces(run.start, run.stop, size)]

    def _codes(self, width: int, rows: int, columns: int) -> Tensor:
        """Of each block of `rows` queries of a run, and `columns` keys, how many of its keys are seen."""
        low, high = {}, {}
        for name, vector in self.vectors.items():
            is_row = name.startswith("r")
            flat = vector.flatten(2).expand(-1, -1, self.s if is_row else self.t)
            apart = _apart(flat, width if is_row else self.t, rows if is_row else columns)
            shape = (vector.shape[0], -1, 1) if is_row else (vector.shape[0], 1, -1)
            low[name], high[name] = apart.amin((1, -1)).reshape(shape), apart.amax((1, -1)).reshape(shape)
        surely, possibly = bounds(self.condition, low, high)
        return surely * ALL + ~possibly * NONE


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


def _positions(starts: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Of each query its position in the whole."""
    found = [torch.arange(start, start + run.stop - run.start, device=device) for run, start in runs_of(starts, count)]
    return torch.cat(found)


def _count(length: int, size: int) -> int:
    """Of so many pieces of at most `size` is a length made."""
    return max(1, -(-length // size))


def _pieces(start: int, stop: int, size: int) -> list[slice]:
    """Pieces of at most `size`, as equal as can be, but for the last."""
    step = max(1, -(-(stop - start) // _count(stop - start, size)))
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _apart(x: Tensor, width: int, size: int) -> Tensor:
    """[b, h, runs * blocks, size] of the last dim: the last block of a run filled up with the run's last element."""
    runs = x.unflatten(-1, (-1, width))
    more = -width % size
    if more:
        runs = torch.cat([runs, runs[..., -1:].expand(*runs.shape[:-1], more)], -1)
    return runs.unflatten(-1, (-1, size)).flatten(2, 3)


def _merged(keys: Sequence[slice], codes: Sequence[int], wanted: int) -> tuple[slice, ...]:
    """The blocks of keys with the code that is wanted; neighbours as one."""
    found: list[slice] = []
    for one, code in zip(keys, codes, strict=True):
        if code == wanted and found and found[-1].stop == one.start:
            found[-1] = slice(found[-1].start, one.stop)
        elif code == wanted:
            found.append(one)
    return tuple(found)


def take(x: Tensor, places: Sequence[slice], dim: int) -> Tensor:
    """The elements of a dim at these places, one after the other."""
    found = [x.narrow(dim, one.start, one.stop - one.start) for one in places]
    return found[0] if len(found) == 1 else torch.cat(found, dim)
