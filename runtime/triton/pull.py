"""The lines that compute a value where it is read: places are followed back to loads.

A value is written once for each place at which it is read. So views are arithmetic of places, and nothing is stored but
the results of a kernel.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.runtime.triton.configuration import Tile
from autopar.runtime.triton.lowering.index import COLUMN, ROW, ZERO, IndexForm, column, contiguous, flat, places, row
from autopar.runtime.triton.lowering.lower import REDUCTIONS, LoweredGroup, walk
from autopar.runtime.triton.lowering.values import TYPES, CannotEmit, Draw, Index, LinearForm, Value

_RESERVED = frozenset(("row", "column", "rows", "rows_in", "columns_in", "inside", "tile", "tl", "triton", "start"))
Strides = tuple[tuple[int, ...] | None, ...]
_NEUTRAL = {"sum": "0.0", "max": "-float('inf')", "min": "float('inf')"}


@dataclass(frozen=True, slots=True)
class TileTerm:
    """An expression of the kernel, and the axes of the tile that it changes along."""

    text: str
    axes: frozenset[str] = frozenset()


@dataclass(slots=True)
class BodyWriter:
    """The text of a kernel's body.

    keeps: whether a program keeps what does not change in a loop, if it has columns, rather than read it again.
    """

    keeps: bool = True
    lines: list[tuple[str, str]] = field(default_factory=list)
    _inner: list[tuple[str, str]] = field(default_factory=list)
    _loop: str = ""
    _known: dict[Any, TileTerm] = field(default_factory=dict)
    _known_inside: dict[Any, TileTerm] = field(default_factory=dict)
    _names: Counter[str] = field(default_factory=Counter)

    def find(self, key: Any) -> TileTerm | None:
        return self._known.get(key) or self._known_inside.get(key)

    def keep(self, key: Any, term: TileTerm) -> TileTerm:
        """Remember what stands for a value, as long as it is in scope."""
        (self._known_inside if self._is_inside(term.axes) else self._known)[key] = term
        return term

    def _is_inside(self, axes: frozenset[str]) -> bool:
        """True for what stands in the loop that is being written: along the axis `_loop`, "" outside of one."""
        return bool(self._loop) and (self._loop in axes or (COLUMN in axes and not self.keeps))

    def name(self, word: str) -> str:
        """A name that no other line has."""
        word = word if word.isidentifier() and not keyword.iskeyword(word) else "value"
        self._names[word] += 1
        count = self._names[word]
        is_free = count == 1 and word not in _RESERVED
        return word if is_free else f"{word}_{count}"

    def put(self, word: str, text: str, axes: frozenset[str], comment: str = "") -> TileTerm:
        """A line `word = text`, in the loop only if it changes there; what has this text already, if something has."""
        tile_term = self.find(text)
        if tile_term is not None:
            return tile_term
        name = self.name(word)
        self.line(f"{name} = {text}", axes, comment)
        return self.keep(text, TileTerm(name, axes))

    def line(self, text: str, axes: frozenset[str] = frozenset((ROW, COLUMN)), comment: str = "") -> None:
        if self._is_inside(axes):
            self._inner.append(("    " + text, comment))
        else:
            self.lines.append((text, comment))

    @contextmanager
    def loop(self, axis: str, header: str, first: Sequence[str], last: str = "") -> Iterator[None]:
        """Lines along an axis go into a loop; what does not change in it stands before it."""
        assert not self._loop
        self._loop = axis
        yield
        self._loop = ""
        body = [(f"    {text}", "") for text in first] + self._inner
        body += [(f"    {last}", "")] if last else []
        self.lines += [(header, ""), *body]
        self._inner, self._known_inside = [], {}


Guard = tuple[TileTerm, ...]


class Puller:
    """Writes the values of a group, for operands of some strides."""

    def __init__(self, lowered: LoweredGroup, tile: Tile, strides: Strides) -> None:
        self.lowered, self.strides, self.width = lowered, strides, lowered.width
        self.writer = BodyWriter(keeps=tile.keeps)
        self.is_padded = tile.columns * tile.across != self.width or (tile.is_looped and self.width % tile.columns > 0)
        self.home = row() * self.width + column(self.width)  # the flat place of an element of the domain
        self.is_looped = tile.is_looped
        # Of each operand, where it is read, and if behind a guard.
        self._reads: dict[int, set[tuple[IndexForm, bool]]] = {}

    def at_home(self, value: Value) -> TileTerm:
        """A value with an element for each of the domain, where that is."""
        return self.pull(value, places(self.home, value.shape))

    def text(self, place: IndexForm) -> str:
        """A place in Python."""
        text = place.text(self.width)
        return f"({text})" if " " in text else text

    def pull(self, value: Value, index: Index, guard: Guard = ()) -> TileTerm:
        """What stands for a value at a place. guard: conditions without which it is not looked at."""
        if value.op == "view":
            return self.pull(value.args[0], value.data(index), guard)
        if value.op == "constant":
            return TileTerm(_literal(value))
        if value.op == "number":
            return TileTerm(f"in{value.data}")
        if value.op == "place":
            return TileTerm(self.text(index[value.data]), _axes(index[value.data]))
        if value.op in REDUCTIONS:
            return self._reduction(value, index)
        key = (id(value), index, guard)
        tile_term = self.writer.find(key)
        if tile_term is None:
            tile_term = self.writer.keep(key, self._written(value, index, guard))
        return tile_term

    def _written(self, value: Value, index: Index, guard: Guard) -> TileTerm:
        if value.op == "load":
            return self._load(value, index, guard)
        if value.op == "point":
            return self._point(value, index, guard)
        if value.op == "parts":
            return self._parts(value, index, guard)
        if value.op == "bits":
            return self._bits(value, index)
        raise CannotEmit(f"{value.name or value.op} is read in the kernel that sums it up")

    def _load(self, value: Value, index: Index, guard: Guard) -> TileTerm:
        strides = self.strides[value.data]
        assert strides is not None
        place = flat(index, strides)
        self._reads.setdefault(value.data, set()).add((flat(index, contiguous(value.shape)), bool(guard)))
        guarded = _union(guard)
        axes = _axes(place) | guarded
        masks = [term.text for term in guard]
        if COLUMN in axes and self.is_padded:
            masks.insert(0, "inside" if ROW in axes else "columns_in")
        elif ROW in axes:
            masks.insert(0, "rows_in")
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        # Triton masks a block of addresses alone: one address behind a guard is repeated.
        again = f" + {min(guarded)} * 0" if guarded and not _axes(place) else ""
        text = f"tl.load(in{value.data} + {self.text(place)}{again}{mask})"
        dtype = self.lowered.operands[value.data]
        assert dtype is not None
        if dtype.dtype == torch.bool:
            text += " != 0"
        elif dtype.dtype != value.dtype:
            text += f".to({TYPES[value.dtype]})"
        return self.writer.put(f"x{value.data}", text, axes)

    def _point(self, value: Value, index: Index, guard: Guard) -> TileTerm:
        terms = [self.pull(arg, _broadcast(index, arg.shape), guard) for arg in value.args]
        texts = [term.text for term in terms]
        if all(arg.op == "constant" for arg in value.args):
            texts[0] = f"tl.full((1, 1), {texts[0]}, {TYPES[value.args[0].dtype]})"
        word = value.name.split("  ")[1].split(".")[1] if value.name else "value"
        return self.writer.put(word, value.data.format(*texts), _union(terms), value.name)

    def _parts(self, value: Value, index: Index, guard: Guard) -> TileTerm:
        """Choose the part at the place; from the last to the first, which are chosen first."""
        dim, starts, fill = value.data
        is_covered = sum(part.shape[dim] for part in value.args) == value.shape[dim]
        chosen = None if is_covered else TileTerm(_literal_of(fill, value.dtype))
        for part, start in reversed(list(zip(value.args, starts, strict=True))):
            within = self._within(index[dim], start, start + part.shape[dim], value.shape[dim])
            moved = (*index[:dim], index[dim] + -start if part.shape[dim] > 1 else ZERO, *index[dim + 1 :])
            term = self.pull(part, moved, (*guard, *within))
            chosen = self._chosen(within, term, chosen, value.name)
        assert chosen is not None
        return chosen

    def _chosen(self, within: Guard, yes: TileTerm, no: TileTerm | None, comment: str) -> TileTerm:
        if no is None or not within:
            return yes
        axes = _union((*within, yes, no))
        condition = " & ".join(term.text for term in within)
        return self.writer.put("part", f"tl.where({condition}, {yes.text}, {no.text})", axes, comment)

    def _within(self, place: IndexForm, start: int, stop: int, size: int) -> Guard:
        """The conditions for a place to be in a part of a dim."""
        text = place.text(self.width)
        tests = [f"{text} >= {start}"] * (start > 0) + [f"{text} < {stop}"] * (stop < size)
        return tuple(self.writer.put("within", test, _axes(place)) for test in tests)

    def _reduction(self, value: Value, index: Index) -> TileTerm:
        if flat(index, contiguous(value.shape)) != row() and self.lowered.rows > 1:
            raise CannotEmit(f"{value.name or value.op} of a row is read in other rows")
        found = self.writer.find((id(value),))
        return found or self.writer.keep((id(value),), self._reduced(value))

    def _reduced(self, value: Value) -> TileTerm:
        """A reduction of the row; lanes beside it do not count."""
        term = self.at_home(value.args[0])
        lanes, inside = term.text, "inside" if self.is_padded else "rows_in & columns_in"
        if self.is_padded or COLUMN not in term.axes:
            lanes = f"tl.where({inside}, {lanes}, {neutral(value)})"
        text = f"tl.{value.op}({lanes}, axis=1, keep_dims=True)"
        return self.writer.put(value.op, text, frozenset((ROW,)), value.name)

    def _bits(self, value: Value, index: Index) -> TileTerm:
        draw: Draw = value.data
        first, second = (self._key(draw, start) for start in ("FIRST", "SECOND"))
        place = flat(index, [stride.const for stride in draw.strides])
        by_rank = [(each, stride) for each, stride in zip(index, draw.strides, strict=True) if stride.terms]
        long = ".to(tl.int64)" if draw.wide else ""
        products = [f"({self.text(each)}) * ({LinearForm(0, stride.terms).text(long)})" for each, stride in by_rank]
        text = " + ".join((self.text(place), *products))
        if draw.wide:  # before it is multiplied
            text = re.sub(rf"\b({ROW}|{COLUMN})\b", r"\1.to(tl.int64)", text)
        text = f"mixed({text} + {draw.start.text(long)}, {first.text}, {second.text}, {draw.wide})"
        axes = _axes(place).union(*(_axes(each) for each, _ in by_rank))
        return self.writer.put("bits", text, axes, value.name)

    def _key(self, draw: Draw, start: str) -> TileTerm:
        text = f"key_of(in{draw.seed}, {draw.key}, {draw.stream}, {start})"
        return self.writer.put(start.lower(), text, frozenset())

    def in_place(self) -> tuple[tuple[int, ...], ...]:
        """For each result the operands of its type that it needs, and that are read only where it is written.

        So a program has read an element before it writes there, and no other reads it.
        """
        return tuple(self._over(i) for i in range(len(self.lowered.results)))

    def _over(self, which: int) -> tuple[int, ...]:
        result = self.lowered.results[which]
        if result.extent != "all" or self.is_looped:
            return ()
        needed = {v.data for v in walk([result.value]) if v.op == "load"}
        return tuple(
            i
            for i, places_read in sorted(self._reads.items())
            if i in needed and places_read == {(self.home, False)} and self._is_alike(i, result.type.dtype)
        )

    def _is_alike(self, operand: int, dtype: torch.dtype) -> bool:
        type_ = self.lowered.operands[operand]
        assert type_ is not None
        size = math.prod(type_.shape)
        return (
            type_.dtype == dtype
            and size == self.lowered.rows * self.width
            and self.strides[operand] == contiguous(type_.shape)
        )


def _axes(form: IndexForm) -> frozenset[str]:
    return frozenset(axis for axis in (ROW, COLUMN) if form.reads(axis))


def _union(terms: Iterable[TileTerm]) -> frozenset[str]:
    """The axes along which one of some terms changes."""
    return frozenset(axis for term in terms for axis in term.axes)


def _broadcast(index: Index, shape: tuple[int, ...]) -> Index:
    kept = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else place for size, place in zip(shape, kept, strict=True))


def neutral(value: Value) -> str:
    """What a reduction takes of lanes that do not count."""
    if value.dtype.is_floating_point:
        return _NEUTRAL[value.op]
    info = torch.iinfo(value.dtype)
    return {"sum": "0", "max": str(info.min), "min": str(info.max)}[value.op]


def is_constant(value: Value) -> bool:
    """True for a number that no tensor is read for."""
    return value.op == "constant" or (value.op == "view" and is_constant(value.args[0]))


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
