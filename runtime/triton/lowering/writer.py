"""The lines of a kernel as they are written: each value once at each place, outside of a loop if it can stand there."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.runtime.triton.lowering.index import COLUMN, ROW

_RESERVED = frozenset(("row", "column", "rows", "rows_in", "columns_in", "inside", "tile", "tl", "triton", "start"))


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
        found = self.find(text)
        if found is not None:
            return found
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
