"""Where an element lies: integer forms of the row and the column of a kernel's domain, simplified as they are made.

A form is a sum of digits with factors: the digit (base // div) % size of the row, the column, or another form.
Splitting a flat place into the places along dims, and joining these again, gives back what was there: a reshape costs
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ROW, COLUMN = "row", "column"


@dataclass(frozen=True, slots=True)
class Digit:
    """(base // div) % size; base // div if size is None, which no number bounds."""

    base: str | IndexForm
    div: int = 1
    size: int | None = None

    def text(self, width: int) -> str:
        """In Python; `width` bounds the column."""
        base = self.base if isinstance(self.base, str) else f"({self.base.text(width)})"
        divided = base if self.div == 1 else f"{base} // {self.div}"
        is_all = self.size is None or (self.base == COLUMN and self.div * self.size >= width)
        return divided if is_all else f"{divided} % {self.size}"


@dataclass(frozen=True, slots=True)
class IndexForm:
    """const + the sum of factor * digit. Terms are in an order of their own, each digit once."""

    terms: tuple[tuple[Digit, int], ...] = ()
    const: int = 0

    def __add__(self, other: IndexForm | int) -> IndexForm:
        if isinstance(other, int):
            return replace(self, const=self.const + other)
        return _joined([*self.terms, *other.terms], self.const + other.const)

    def __mul__(self, factor: int) -> IndexForm:
        return IndexForm(tuple((d, f * factor) for d, f in self.terms) if factor else (), self.const * factor)

    def reads(self, base: str) -> bool:
        """True if it depends on the row, or on the column."""
        return any(d.base == base or (isinstance(d.base, IndexForm) and d.base.reads(base)) for d, _ in self.terms)

    def split(self, size: int) -> tuple[IndexForm, IndexForm]:
        """(self // size, self % size)"""
        if size == 1:
            return self, ZERO
        high, low = [], []
        for digit, factor in self.terms:
            upper, lower = _split_term(digit, factor, size)
            high += upper
            low += lower
        above, rest = divmod(self.const, size)
        if _most(low) + rest < size and all(f > 0 for _, f in low):
            return _joined(high, above), _joined(low, rest)
        return IndexForm(((Digit(self, size), 1),)), IndexForm(((Digit(self, 1, size), 1),))

    def text(self, width: int) -> str:
        """In Python, as a sum."""
        parts = [d.text(width) if f == 1 else _times(d.text(width), f) for d, f in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


ZERO = IndexForm()


def row() -> IndexForm:
    return IndexForm(((Digit(ROW), 1),))


def column(width: int) -> IndexForm:
    return IndexForm(((Digit(COLUMN, 1, width), 1),)) if width > 1 else ZERO


def flat(index: Sequence[IndexForm], strides: Sequence[int]) -> IndexForm:
    """The sum of places times strides."""
    total = ZERO
    for place, stride in zip(index, strides, strict=True):
        total = total + place * stride
    return total


def places(flat_place: IndexForm, shape: Sequence[int]) -> tuple[IndexForm, ...]:
    """The places along the dims of a contiguous shape. The outermost is bounded by nothing: that of the rows."""
    found, rest = [], flat_place
    outermost = next((d for d, size in enumerate(shape) if size != 1), 0)
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            found.append(ZERO)
        elif dim == outermost:
            found.append(rest)
        else:
            rest, low = rest.split(shape[dim])
            found.append(low)
    return tuple(reversed(found))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _times(text: str, factor: int) -> str:
    return f"{text} * {factor}" if " " not in text else f"({text}) * {factor}"


def _most(terms: Iterable[tuple[Digit, int]]) -> float:
    """The largest value of a sum of terms."""
    return sum(float("inf") if d.size is None else f * (d.size - 1) for d, f in terms)


def _split_term(digit: Digit, factor: int, size: int) -> tuple[list[tuple[Digit, int]], list[tuple[Digit, int]]]:
    """factor * digit as (high, low) terms: size * high + low."""
    if factor % size == 0:
        return [(digit, factor // size)], []
    fits = digit.size is not None and factor * digit.size <= size
    if fits or factor < 0 or size % factor:
        return [], [(digit, factor)]  # small enough, or the caller finds that it is not
    step = size // factor
    above = None if digit.size is None else -(-digit.size // step)
    if digit.size is not None and digit.size % step:
        return [], [(digit, factor)]
    return [(Digit(digit.base, digit.div * step, above), 1)], [(Digit(digit.base, digit.div, step), factor)]


def _joined(terms: Iterable[tuple[Digit, int]], const: int) -> IndexForm:
    """Equal digits added up, and neighbouring digits of a base joined to one."""
    factors: dict[Digit, int] = {}
    for digit, factor in terms:
        factors[digit] = factors.get(digit, 0) + factor
    found = {d: f for d, f in factors.items() if f}
    while (pair := _neighbours(found)) is not None:
        low, high = pair
        factor = found.pop(low)
        del found[high]
        joined = Digit(low.base, low.div, None if high.size is None or low.size is None else low.size * high.size)
        found[joined] = found.get(joined, 0) + factor
    return IndexForm(tuple(sorted(found.items(), key=lambda item: (-item[1], repr(item[0])))), const)


def _neighbours(factors: dict[Digit, int]) -> tuple[Digit, Digit] | None:
    for low, factor in factors.items():
        if low.size is None:
            continue
        for high, other in factors.items():
            if high.base == low.base and high.div == low.div * low.size and other == factor * low.size:
                return low, high
    return None
