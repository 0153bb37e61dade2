"""Writes a lowered group as the text of one Triton kernel.

The frame of a kernel says which rows and columns a program has, and loops over them; what it computes is pulled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from autopar.runtime.triton.configuration import Tile, tile_of
from autopar.runtime.triton.lowering.index import COLUMN, ROW, ZERO, column, contiguous, row
from autopar.runtime.triton.lowering.lower import REDUCTIONS, LoweredGroup, Result
from autopar.runtime.triton.lowering.values import TYPES, CannotEmit, Value
from autopar.runtime.triton.pull import Puller, Strides, is_constant, neutral

_BOTH = frozenset((ROW, COLUMN))
FAR = 2**31  # elements: beyond, a place needs 64 bits


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text of a kernel: `body` has no names of the program, so that equal groups have equal bodies; `comments` are
    one a line. in_place: for each result the operands over which it may be written."""

    name: str
    head: tuple[str, ...]
    body: tuple[str, ...]
    comments: tuple[str, ...]
    tile: Tile
    in_place: tuple[tuple[int, ...], ...]
    draws: bool

    @property
    def digest(self) -> str:
        """What tells kernels apart that do the same from those that do not."""
        return hashlib.sha256("\n".join((self.name, *self.body, str(self.tile))).encode()).hexdigest()[:12]


def emit(lowered: LoweredGroup, strides: Strides | None = None) -> KernelText:
    """The kernel of a group whose operands have these strides; contiguous if not given. Raises CannotEmit."""
    given = strides or tuple(None if t is None else contiguous(t.shape) for t in lowered.operands)
    frame = _Frame(lowered, tile_of(lowered), given)
    frame.write()
    lines = frame.writer.lines
    inputs = [f"in{i}" for i in range(len(lowered.operands))]
    outputs = [f"out{i}" for i in range(len(lowered.results))]
    signature = f"def KERNEL({', '.join((*inputs, *outputs))}, rows, WIDE: tl.constexpr):"
    head = [f"{name}: {text}" for name, text in zip((*inputs, *outputs), lowered.described, strict=True)]
    body, comments = zip(*lines, strict=True)
    return KernelText(
        lowered.name, tuple(head), (signature, *(f"    {text}" for text in body)), ("", *comments), frame.tile,
        frame.puller.in_place(), any(v.op == "bits" for v in lowered.values()),
    )  # fmt: skip


class _Frame:
    """Writes one kernel."""

    def __init__(self, lowered: LoweredGroup, tile: Tile, strides: Strides) -> None:
        self.lowered, self.tile, self.width = lowered, tile, lowered.width
        self.puller = Puller(lowered, tile, strides)
        self.writer = self.puller.writer

    def write(self) -> None:
        if self.tile.is_persistent:
            self._persistent()
        elif self.tile.is_looped:
            self._set_rows("tl.program_id(0)", frozenset())
            self._looped()
        else:
            across = self.tile.across
            self._set_rows("tl.program_id(0)" + (f" // {across}" if across > 1 else ""), frozenset())
            self._set_columns(f"tl.program_id(0) % {across}" if across > 1 else "")
            self._inside(frozenset())
            self._results()

    def _set_rows(self, tile: str, axes: frozenset[str]) -> None:
        count = self.tile.rows
        tile = tile if " " not in tile else f"({tile})"
        place = f"{tile} * {count}" if count > 1 else tile
        self.writer.line(f"row = {place} + tl.arange(0, {count})[:, None]", axes)
        self.writer.line("row = row.to(tl.int64) if WIDE else row", axes)
        self.writer.line("rows_in = row < rows", axes)

    def _set_columns(self, tile: str) -> None:
        """Where the columns of a tile are; nothing is written for a domain of one column."""
        start = (f"({tile})" if " " in tile else tile) + f" * {self.tile.columns} + " if tile else ""
        self.writer.line(f"column = {start}tl.arange(0, {self.tile.columns})[None, :]", frozenset())
        self.writer.line("column = column.to(tl.int64) if WIDE else column", frozenset())
        self.writer.line(f"columns_in = column < {self.width}", frozenset())

    def _inside(self, axes: frozenset[str]) -> None:
        self.writer.line("inside = rows_in & columns_in", axes)

    def _persistent(self) -> None:
        """A program takes every n-th tile of rows and adds them up: partial sums, one row for each program."""
        if self.tile.is_looped:
            raise CannotEmit(f"it sums over rows of {self.width:,} elements, which a program does not hold")
        sums = [i for i, result in enumerate(self.lowered.results) if result.extent == "columns"]
        w, tile = self.writer, self.tile
        self._set_columns("tl.program_id(1)" if tile.across > 1 else "")
        for i in sums:
            dtype = TYPES[self.lowered.results[i].value.dtype]
            w.line(f"total{i} = tl.zeros(({tile.rows}, {tile.columns}), {dtype})")
        w.line("tile = tl.program_id(0)")
        with w.loop(ROW, f"while tile * {tile.rows} < rows:", (), "tile += tl.num_programs(0)"):
            self._set_rows("tile", _BOTH)
            self._inside(_BOTH)
            for i in sums:
                source = self.lowered.results[i].value.args[0]
                term = self.puller.at_home(source)
                w.line(f"total{i} += tl.where(inside, {term.text}, 0)", comment=self.lowered.results[i].value.name)
            self._results()
        for i in sums:
            place = f"tl.program_id(0) * {self.width} + column"
            w.line(f"tl.store(out{i} + ({place}), tl.sum(total{i}, axis=0, keep_dims=True), mask=columns_in)")

    def _looped(self) -> None:
        """One loop over the row for the reductions that need no other, one for those that need these, and so on; one
        more for the results."""
        levels = self._levels()
        for level in sorted(set(levels.values())):
            which = [v for v in self.lowered.reductions if levels[id(v)] == level]
            self._reduce_in_loop(which)
        self._results("rows")
        if any(result.extent == "all" for result in self.lowered.results):
            with self._loop_along_columns():
                self._results("all")

    def _loop_along_columns(self) -> AbstractContextManager[None]:
        step = self.tile.columns
        first = (
            f"column = start + tl.arange(0, {step})[None, :]",
            "column = column.to(tl.int64) if WIDE else column",
            f"columns_in = column < {self.width}",
            "inside = rows_in & columns_in",
        )
        return self.writer.loop(COLUMN, f"for start in range(0, {self.width}, {step}):", first)

    def _reduce_in_loop(self, which: Sequence[Value]) -> None:
        w, shape = self.writer, f"({self.tile.rows}, {self.tile.columns})"
        names = [w.name(f"partial_{value.op}") for value in which]
        for value, name in zip(which, names, strict=True):
            w.line(f"{name} = tl.full({shape}, {neutral(value)}, {TYPES[value.dtype]})")
        with self._loop_along_columns():
            for value, name in zip(which, names, strict=True):
                term = self.puller.at_home(value.args[0])
                lane = f"tl.where(inside, {term.text}, {neutral(value)})"
                joined = f"{name} + {lane}" if value.op == "sum" else f"tl.{value.op}imum({name}, {lane})"
                w.line(f"{name} = {joined}", comment=value.name)
        for value, name in zip(which, names, strict=True):
            term = w.put(value.op, f"tl.{value.op}({name}, axis=1, keep_dims=True)", frozenset((ROW,)))
            w.keep((id(value),), term)

    def _levels(self) -> dict[int, int]:
        """For each reduction how many stand before it on a path."""
        depth: dict[int, int] = {}
        for value in self.lowered.values():
            below = max((depth[id(arg)] for arg in value.args), default=0)
            depth[id(value)] = below + (value.op in REDUCTIONS)
        return {id(v): depth[id(v)] for v in self.lowered.reductions}

    def _results(self, *extents: str) -> None:
        """Store the results that have an element for each of the domain, or for each row."""
        for i, result in enumerate(self.lowered.results):
            if result.extent != "columns" and result.extent in (extents or ("all", "rows")):
                self._store(i, result)

    def _store(self, which: int, result: Result) -> None:
        is_all, puller = result.extent == "all", self.puller
        term = puller.pull(result.value, (row(), column(self.width) if is_all else ZERO))
        place = puller.text(puller.home if is_all else row())
        mask = ("inside" if puller.is_padded else "rows_in") if is_all else self._once_a_row()
        dtype, text = TYPES[result.type.dtype], term.text
        if is_constant(result.value):
            text = _full(text, dtype)
        elif result.type.dtype != result.value.dtype:
            text = f"{text}.to({dtype})"
        self.writer.line(f"tl.store(out{which} + {place}, {text}, mask={mask})")

    def _once_a_row(self) -> str:
        """Let the first of several tiles in a row write what there is one of."""
        if self.tile.across == 1:
            return "rows_in"
        tile = "tl.program_id(1)" if self.tile.is_persistent else f"tl.program_id(0) % {self.tile.across}"
        return f"rows_in & ({tile} == 0)"


def _full(text: str, dtype: str) -> str:
    return text if text.startswith("tl.") else f"tl.full((1, 1), {text}, {dtype})"
