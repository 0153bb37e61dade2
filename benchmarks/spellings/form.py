"""A form that the compiler knows, and the ways in which people write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import autopar
from autopar.compiled import Compiled
from autopar.errors import AutoparError

REACHED, TOLD, REFUSED, LOST = "reached", "a note", "refused", "lost"


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What is written in several ways; `ways[first]` is the one that the others are compared with.

    reaches: what every way should become, in words. model: given a way, the module. is_reached: whether a program has
    the form, beside that no more is moved than for the first way. spare: bytes that may be moved more: numbers of rows.
    """

    title: str
    reaches: str
    mesh: str
    batch: Any
    model: Callable[[Any], nn.Module]
    ways: Mapping[str, Any]
    loss: Callable[[Any], Any] = lambda way: None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_reached: Callable[[Compiled], bool] = lambda compiled: True
    spare: int = 0

    def compiled(self, way: str) -> Compiled:
        """The program of one way."""
        body = self.ways[way]
        return autopar.compile(
            self.model(body).double(), self.mesh, loss_fn=self.loss(body), batch=self.batch, **self.options
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one way. why: the note, or the error."""

    form: str
    way: str
    result: str
    why: str = ""


def outcomes(form: Form, ways: Iterable[str] | None = None) -> list[Outcome]:
    """What becomes of some ways of a form, or of each: it is reached, a note or an error says what is not, or nothing
    is said."""
    first = form.compiled(next(iter(form.ways)))
    return [_outcome(form, way, first) for way in (form.ways if ways is None else ways)]


def _outcome(form: Form, way: str, first: Compiled) -> Outcome:
    try:
        compiled = form.compiled(way)
    except AutoparError as error:
        return Outcome(form.title, way, REFUSED, str(error))
    if _moved(compiled) <= _moved(first) + form.spare and form.is_reached(compiled):
        return Outcome(form.title, way, REACHED)
    said = set(map(_without_place, first.notes))
    notes = [note for note in compiled.notes if _without_place(note) not in said]
    return Outcome(form.title, way, TOLD if notes else LOST, "; ".join(notes))


def _moved(compiled: Compiled) -> int:
    """The bytes that a rank moves in a step."""
    return sum(row.bytes * row.times for row in compiled.collectives)


def _without_place(note: str) -> str:
    return note.split(" at ")[0]
