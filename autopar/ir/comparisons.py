"""Masks as conditions on a query and a key: comparisons of a vector over queries with a vector over keys.

As text, `c0<=r0 & (c1>=r1 | ~c2)`: r0, r1, ... are vectors over the queries (rows of the mask), c0, c1, ... over the
keys (its columns). A comparison names the column first; a name alone is a vector of bools. `true` is seen by all.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import PlanError

Tensor = torch.Tensor
# A number that hides a key as -inf does, beside one that is seen: exp(score + HIDING - score of the other) is 0 for all
# scores that make sense. Where none is seen it hides nothing: all keys are seen alike.
HIDING = -1e30
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_TOKEN = re.compile(r"\s*(true|[rc]\d+|<=|>=|==|!=|[<>&|~()])")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of an element of a column vector with one of a row vector."""

    column: str
    sign: str
    row: str

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{self.row}"


@dataclass(frozen=True, slots=True)
class BoolVector:
    """An element of a vector of bools, or its opposite."""

    name: str
    is_true: bool = True

    def __str__(self) -> str:
        return self.name if self.is_true else f"~{self.name}"


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds; of no parts: true."""

    parts: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Some) else str(part) for part in self.parts) or "true"


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds; of no parts: false."""

    parts: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


Condition = Comparison | BoolVector | All | Some
TRUE, FALSE = All(), Some()


def every(*parts: Condition) -> Condition:
    """All of some conditions, as one."""
    return _joined(parts, All, Some)


def some(*parts: Condition) -> Condition:
    """At least one of some conditions, as one."""
    return _joined(parts, Some, All)


def _joined(parts: Iterable[Condition], kind: Any, other: Any) -> Condition:
    """Without parts of the same kind in it, repeated parts, and what says nothing."""
    flat: dict[Condition, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, kind) else (part,)))
    if other() in flat or any(opposite(part) in flat for part in flat if isinstance(part, (Comparison, BoolVector))):
        return other()  # type: ignore[no-any-return]
    return next(iter(flat)) if len(flat) == 1 else kind(tuple(flat))  # type: ignore[no-any-return]


def opposite(condition: Condition) -> Condition:
    """What holds where a condition does not."""
    match condition:
        case Comparison(column, sign, row):
            return Comparison(column, _OPPOSITE[sign], row)
        case BoolVector(name, is_true):
            return BoolVector(name, not is_true)
        case All(parts):
            return some(*map(opposite, parts))
        case Some(parts):
            return every(*map(opposite, parts))


def names_in(condition: Condition) -> tuple[str, ...]:
    """The vectors of a condition, in the order of their first use."""
    match condition:
        case Comparison(column, _, row):
            return column, row
        case BoolVector(name):
            return (name,)
        case All(parts) | Some(parts):
            return tuple(dict.fromkeys(name for part in parts for name in names_in(part)))


def renamed(condition: Condition, names: Mapping[str, str]) -> Condition:
    """A condition on vectors of other names."""
    match condition:
        case Comparison(column, sign, row):
            return Comparison(names[column], sign, names[row])
        case BoolVector(name, is_true):
            return BoolVector(names[name], is_true)
        case All(parts):
            return every(*(renamed(part, names) for part in parts))
        case Some(parts):
            return some(*(renamed(part, names) for part in parts))


def holds(condition: Condition, values: Mapping[str, Tensor]) -> Tensor | None:
    """Where a condition holds, broadcast over its vectors; None for everywhere."""
    match condition:
        case Comparison(column, sign, row):
            found: Tensor = SIGNS[sign](values[column], values[row])
            return found
        case BoolVector(name, is_true):
            return values[name] if is_true else ~values[name]
        case All(parts):
            both = [one for part in parts if (one := holds(part, values)) is not None]
            return functools.reduce(operator.and_, both) if both else None
        case Some(parts):
            either = [one for part in parts if (one := holds(part, values)) is not None]
            if len(either) < len(parts):
                return None
            return functools.reduce(operator.or_, either) if either else torch.tensor(False, device="cpu")


@functools.cache
def parse_condition(text: str) -> Condition:
    """Read a condition. Raises PlanError for what is none."""
    tokens, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise PlanError(f"condition '{text}': cannot read '{text[at:]}'; write it like 'c0<=r0 & ~c1'.")
        tokens.append(match[1])
        at = match.end()
    alternatives = _Reader(text, tokens).alternatives()
    return alternatives


@dataclass(slots=True)
class _Reader:
    """Reads tokens from the left. `&` binds closer than `|`."""

    text: str
    tokens: list[str]

    def alternatives(self, is_inner: bool = False) -> Condition:
        parts = [self._conjunction()]
        while self._takes("|"):
            parts.append(self._conjunction())
        if is_inner != self._takes(")") or (self.tokens and not is_inner):
            self._fail()
        return some(*parts)

    def _conjunction(self) -> Condition:
        parts = [self._part()]
        while self._takes("&"):
            parts.append(self._part())
        return every(*parts)

    def _part(self) -> Condition:
        if self._takes("("):
            return self.alternatives(is_inner=True)
        if self._takes("true"):
            return TRUE
        is_true = not self._takes("~")
        name = self._name()
        if is_true and self.tokens and self.tokens[0] in _OPPOSITE:
            if not name.startswith("c") or not self.tokens[1:2] or not self.tokens[1].startswith("r"):
                self._fail()
            return Comparison(name, self.tokens.pop(0), self._name())
        return BoolVector(name, is_true)

    def _name(self) -> str:
        if not self.tokens or self.tokens[0][0] not in "rc":
            self._fail()
        return self.tokens.pop(0)

    def _takes(self, token: str) -> bool:
        if self.tokens and self.tokens[0] == token:
            self.tokens.pop(0)
            return True
        return False

    def _fail(self) -> None:
        rest = " ".join(self.tokens) or "its end"
        raise PlanError(f"condition '{self.text}': cannot read '{rest}'; write it like 'c0<=r0 & ~c1'.")
