"""The numbers of which hypothesis makes journeys: those of a row are the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider


class Draws(PrimitiveProvider):
    """A backend of hypothesis: uniform numbers of a generator of its own.

    Hypothesis's own backend takes one integer in 20 from the constants in the source of whatever is imported, if it
    allows any of 100 and above, as its choice of rules does: one row in 20 would change with each such constant.
    """

    row: ClassVar[str]

    def __init__(self, conjecturedata: Any, /) -> None:
        super().__init__(conjecturedata)
        self._random = random.Random(self.row)

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self._random.random() < p

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **hints: Any) -> int:
        assert min_value is not None and max_value is not None, "journeys draw from ranges"
        return self._random.randint(min_value, max_value)

    def draw_float(self, **bounds: Any) -> float:
        raise NotImplementedError("journeys draw one of a few floats, by its number")

    def draw_string(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("journeys draw one of a few texts, by its number")

    def draw_bytes(self, *args: Any, **kwargs: Any) -> bytes:
        raise NotImplementedError("journeys draw no bytes")


@contextmanager
def backend_of(row: str) -> Iterator[str]:
    """The name of the backend that draws a row."""
    name = f"journeys {row}"
    AVAILABLE_PROVIDERS[name] = type("DrawsOfRow", (Draws,), {"row": row})
    try:
        yield name
    finally:
        del AVAILABLE_PROVIDERS[name]
