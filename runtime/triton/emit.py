"""Writes a lowered group as the text of one Triton kernel.

Results are pulled: a value is written where it is read, at the place where it is read, and loads stand at the end of
every path. So views are arithmetic of places, and nothing is stored but the results.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.runtime.triton.configuration import Tile, tile_of
from autopar.runtime.triton.index import COLUMN, ROW, ZERO, Form, column, contiguous, flat, places, row
from autopar.runtime.triton.lower import REDUCTIONS, Lowered, walk
from autopar.runtime.triton.values import TYPES, CannotEmit, Draw, Index, Value
from autopar.runtime.triton.writer import Term, Writer

Strides = tuple[tuple[int, ...] | None, ...]
_BOTH = frozenset((ROW, COLUMN))
FAR = 2**31  # elements: beyond, a place needs 64 bits
_NEUTRAL = {"sum": "0.0", "max": "-float('inf')", "min": "float('inf')"}


@dataclass(frozen=True, slots=True)
class Kernel:
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


def emit(lowered: Lowered, strides: Strides | None = None) -> Kernel:
    """The kernel of a group whose operands have these strides; contiguous if not given. Raises CannotEmit."""
    given = strides or tuple(t and contiguous(t.shape) for t in lowered.operands)
    emitter = _Emitter(lowered, tile_of(lowered), given)
    emitter.write()
    lines = emitter.writer.lines
    inputs = [f"in{i}" for i in range(len(lowered.operands))]
    outputs = [f"out{i}" for i in range(len(lowered.results))]
    signature = f"def KERNEL({', '.join((*inputs, *outputs))}, rows, WIDE: tl.constexpr):"
    head = [f"{name}: {text}" for name, text in zip((*inputs, *outputs), lowered.described, strict=True)]
    body, comments = zip(*lines, strict=True)
    return Kernel(
        lowered.name, tuple(head), (signature, *(f"    {text}" for text in body)), ("", *comments), emitter.tile,
        emitter.in_place(), any(v.op == "bits" for v in lowered.values()),
    )  # fmt: skip


class _Emitter:
    """Writes one kernel."""

    def __init__(self, lowered: Lowered, tile: Tile, strides: Strides) -> None:
        self.lowered, self.tile, self.strides, self.writer = lowered, tile, strides, Writer()
        self.width = lowered.width
        self.is_padded = tile.columns * tile.across != self.width or tile.is_looped and self.width % tile.columns > 0
        self.home = row() * self.width + column(self.width)  # the flat place of an element of the domain
        self.reads: dict[int, set[tuple[Form, bool]]] = {}  # of each operand, where it is read, and if behind a guard

    # -- the frame of a kernel ------------------------------------------------------------------------------------------

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
        with w.loop(ROW, f"while tile * {tile.rows} < rows:", "", "tile += tl.num_programs(0)"):
            self._set_rows("tile", _BOTH)
            self._inside(_BOTH)
            for i in sums:
                source = self.lowered.results[i].value.args[0]
                term = self._emit(source, places(self.home, source.shape), ())
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

    def _loop_along_columns(self):  # type: ignore[no-untyped-def]
        step = self.tile.columns
        first = f"column = start + tl.arange(0, {step})[None, :]\ncolumns_in = column < {self.width}\ninside = rows_in & columns_in"
        return self.writer.loop(COLUMN, f"for start in range(0, {self.width}, {step}):", first)

    def _reduce_in_loop(self, which: Sequence[Value]) -> None:
        w, shape = self.writer, f"({self.tile.rows}, {self.tile.columns})"
        names = [w.name(f"partial_{value.op}") for value in which]
        for value, name in zip(which, names, strict=True):
            w.line(f"{name} = tl.full({shape}, {_neutral(value)}, {TYPES[value.dtype]})")
        with self._loop_along_columns():
            for value, name in zip(which, names, strict=True):
                term = self._emit(value.args[0], places(self.home, value.args[0].shape), ())
                lane = f"tl.where(inside, {term.text}, {_neutral(value)})"
                joined = {"sum": f"{name} + {lane}", "max": f"tl.maximum({name}, {lane})", "min": f"tl.minimum({name}, {lane})"}
                w.line(f"{name} = {joined[value.op]}", comment=value.name)
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
            if result.extent == "columns" or (extents and result.extent not in extents):
                continue
            is_all = result.extent == "all"
            term = self._emit(result.value, (row(), column(self.width) if is_all else ZERO), ())
            place = self.home if is_all else row()
            mask = "inside" if is_all and self.is_padded else "rows_in"
            if not is_all and self.tile.across > 1:
                mask = "rows_in & (tl.program_id(1) == 0)" if self.tile.is_persistent else f"rows_in & (tl.program_id(0) % {self.tile.across} == 0)"
            dtype = TYPES[result.type.dtype]
            text = term.text if result.type.dtype == result.value.dtype else f"{term.text}.to({dtype})"
            if _is_constant(result.value):
                text = f"tl.full((1, 1), {term.text}, {dtype})"
            self.writer.line(f"tl.store(out{i} + {self._text(place)}, {text}, mask={mask})")

    # -- values -------------------------------------------------------------------------------------------------------

    def _emit(self, value: Value, index: Index, guard: tuple[Term, ...]) -> Term:
        """What stands for a value at a place. guard: conditions without which it is not looked at."""
        if value.op == "view":
            return self._emit(value.args[0], value.data(index), guard)
        if value.op == "constant":
            return Term(_literal(value))
        if value.op == "number":
            return Term(f"in{value.data}")
        if value.op == "place":
            return Term(self._text(index[value.data]), _axes(index[value.data]))
        if value.op in REDUCTIONS:
            return self._reduction(value, index)
        key = (id(value), index, guard)
        found = self.writer.find(key)
        if found is None:
            found = self.writer.keep(key, self._written(value, index, guard))
        return found

    def _text(self, place: Form) -> str:
        text = place.text(self.width)
        return f"({text})" if " " in text else text

    def _written(self, value: Value, index: Index, guard: tuple[Term, ...]) -> Term:
        if value.op == "load":
            return self._load(value, index, guard)
        if value.op == "point":
            return self._point(value, index, guard)
        if value.op == "parts":
            return self._parts(value, index, guard)
        if value.op == "bits":
            return self._bits(value, index)
        raise CannotEmit(f"{value.name or value.op} is read in the kernel that sums it up")

    def _load(self, value: Value, index: Index, guard: tuple[Term, ...]) -> Term:
        strides = self.strides[value.data]
        assert strides is not None
        place = flat(index, strides)
        self.reads.setdefault(value.data, set()).add((flat(index, contiguous(value.shape)), bool(guard)))
        axes = _axes(place).union(*(term.axes for term in guard))
        masks = [term.text for term in guard]
        if COLUMN in axes and self.is_padded:
            masks.insert(0, "inside" if ROW in axes else "columns_in")
        elif ROW in axes:
            masks.insert(0, "rows_in")
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        text = f"tl.load(in{value.data} + {self._text(place)}{mask})"
        dtype = self.lowered.operands[value.data]
        assert dtype is not None
        if dtype.dtype == torch.bool:
            text += " != 0"
        elif dtype.dtype != value.dtype:
            text += f".to({TYPES[value.dtype]})"
        return self.writer.put(f"x{value.data}", text, axes)

    def _point(self, value: Value, index: Index, guard: tuple[Term, ...]) -> Term:
        terms = [self._emit(arg, _broadcast(index, arg.shape), guard) for arg in value.args]
        texts = [term.text for term in terms]
        if all(arg.op == "constant" for arg in value.args):
            texts[0] = f"tl.full((1, 1), {texts[0]}, {TYPES[value.args[0].dtype]})"
        axes = frozenset[str]().union(*(term.axes for term in terms))
        word = value.name.split("  ")[1].split(".")[1] if value.name else "value"
        return self.writer.put(word, value.data.format(*texts), axes, value.name)

    def _parts(self, value: Value, index: Index, guard: tuple[Term, ...]) -> Term:
        dim, starts, fill = value.data
        place, found = index[dim], None
        for part, start in reversed(list(zip(value.args, starts, strict=True))):
            within = self._within(place, start, start + part.shape[dim], value.shape[dim])
            moved = (*index[:dim], place + -start if part.shape[dim] > 1 else ZERO, *index[dim + 1 :])
            term = self._emit(part, moved, (*guard, *within))
            if not within:
                found = term
                continue
            other = Term(_literal_of(fill, value.dtype)) if found is None and not self._covers(value) else found
            condition = " & ".join(t.text for t in within)
            axes = term.axes.union(*(t.axes for t in within), other.axes if other else ())
            found = term if other is None else self.writer.put("part", f"tl.where({condition}, {term.text}, {other.text})", axes, value.name)
        assert found is not None
        return found

    def _covers(self, value: Value) -> bool:
        """True if the parts leave no place out."""
        dim, _, _ = value.data
        return sum(part.shape[dim] for part in value.args) == value.shape[dim]

    def _within(self, place: Form, start: int, stop: int, size: int) -> tuple[Term, ...]:
        """The conditions for a place to be in a part of a dim."""
        tests = ([f"{place.text(self.width)} >= {start}"] if start else []) + ([f"{place.text(self.width)} < {stop}"] if stop < size else [])
        return tuple(self._condition(test, _axes(place)) for test in tests)

    def _condition(self, text: str, axes: frozenset[str]) -> Term:
        return self.writer.put("within", text, axes)

    def _reduction(self, value: Value, index: Index) -> Term:
        if flat(index, contiguous(value.shape)) != row() and self.lowered.rows > 1:
            raise CannotEmit(f"{value.name or value.op} of a row is read in other rows")
        key = (id(value),)
        found = self.writer.find(key)
        if found is not None:
            return found
        source = value.args[0]
        term = self._emit(source, places(self.home, source.shape), ())
        lanes = term.text
        if self.is_padded or COLUMN not in term.axes:
            lanes = f"tl.where({'inside' if self.is_padded else 'rows_in & columns_in'}, {lanes}, {_neutral(value)})"
        made = self.writer.put(value.op, f"tl.{value.op}({lanes}, axis=1, keep_dims=True)", frozenset((ROW,)), value.name)
        return self.writer.keep(key, made)

    def _bits(self, value: Value, index: Index) -> Term:
        draw: Draw = value.data
        keys = [self._key(draw, start) for start in ("FIRST", "SECOND")]
        place = flat(index, draw.strides)
        start = self._start(draw)
        text = f"mixed({place.text(self.width)} + {start}, {keys[0].text}, {keys[1].text}, {draw.wide})"
        if draw.wide:
            text = text.replace(f"({place.text(self.width)} + ", f"(({place.text(self.width)}).to(tl.int64) + ")
        return self.writer.put("bits", text, _axes(place), value.name)

    def _key(self, draw: Draw, start: str) -> Term:
        text = f"key_of(in{draw.seed}, {draw.key}, {draw.stream}, {start})"
        return self.writer.put(start.lower(), text, frozenset())

    def _start(self, draw: Draw) -> str:
        """Where the piece starts in the whole: its offsets times the strides."""
        known = sum(o * s for o, s in zip(draw.offsets, draw.strides, strict=True) if not isinstance(o, Value))
        given = [f"in{o.data} * {s}" for o, s in zip(draw.offsets, draw.strides, strict=True) if isinstance(o, Value)]
        return " + ".join((*given, str(known)))

    def in_place(self) -> tuple[tuple[int, ...], ...]:
        """For each result the operands of its type that are read where it is written, and only there, and that it needs.

        So a program has read an element before it writes there, and no other reads it.
        """
        return tuple(self._over(i) for i in range(len(self.lowered.results)))

    def _over(self, which: int) -> tuple[int, ...]:
        result = self.lowered.results[which]
        if result.extent != "all" or self.tile.is_looped:
            return ()
        needed = {v.data for v in walk([result.value]) if v.op == "load"}
        return tuple(
            i
            for i, places_read in sorted(self.reads.items())
            if i in needed and places_read == {(self.home, False)} and self._is_alike(i, result.type.dtype)
        )

    def _is_alike(self, operand: int, dtype: torch.dtype) -> bool:
        type_ = self.lowered.operands[operand]
        assert type_ is not None
        size = math.prod(type_.shape)
        return type_.dtype == dtype and size == self.lowered.rows * self.width and self.strides[operand] == contiguous(type_.shape)


def _axes(form: Form) -> frozenset[str]:
    return frozenset(axis for axis in (ROW, COLUMN) if form.reads(axis))


def _broadcast(index: Index, shape: tuple[int, ...]) -> Index:
    kept = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else place for size, place in zip(shape, kept, strict=True))


def _neutral(value: Value) -> str:
    if value.dtype.is_floating_point:
        return _NEUTRAL[value.op]
    info = torch.iinfo(value.dtype)
    return {"sum": "0", "max": str(info.min), "min": str(info.max)}[value.op]


def _is_constant(value: Value) -> bool:
    return value.op == "constant" or (value.op == "view" and _is_constant(value.args[0]))


def _literal(value: Value) -> str:
    return _literal_of(value.data, value.dtype)


def _literal_of(number: float | int | bool, dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return repr(bool(number) if dtype == torch.bool else int(number))
    number = float(number)
    text = repr(number) if math.isfinite(number) else f"float('{number}')"
    if dtype == torch.float64:
        return f"tl.full((1, 1), {text}, tl.float64)"
    return f"({text})" if number < 0 else text
