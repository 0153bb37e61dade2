"""What of a plan is decided beforehand, as a person writes it: `tp=8`, `sequence=false`, `order=pp,dp,tp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.planning.space.axis_orders import ORDER
from autopar.planning.space.candidates import BY_STAGE, GPIPE, OFFLOADS, PIPELINES, RECOMPUTE, RESHARD


@dataclass(frozen=True, slots=True)
class FieldText:
    """How a field of a candidate is written. read: its value; None of what it cannot be."""

    written: str
    read: Callable[[str], Any]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _count(text: str) -> int | None:
    return _number(text) or None


def _order(text: str) -> tuple[str, ...] | None:
    axes = tuple(text.split(","))
    return axes if set(axes) <= set(ORDER) and len(set(axes)) == len(axes) else None


def _word(*words: str) -> FieldText:
    return FieldText("|".join(words), lambda text: text if text in words else None)


WAYS: Mapping[str, FieldText] = {
    **dict.fromkeys(("dp", "fsdp", "cp", "ulysses", "tp", "pp"), FieldText("N", _count)), "zero": FieldText("N",
    _number), **dict.fromkeys(("rows", "microbatches", "chunks"), FieldText("N", _count)),
    "recompute": _word(*RECOMPUTE, *BY_STAGE), "schedule": _word(*dict(PIPELINES), GPIPE),
    **dict.fromkeys(("sequence", RESHARD), FieldText("true|false", {"true": True, "false": False}.get)),
    "offload": _word(*OFFLOADS),
    "order": FieldText("AXIS,AXIS,...", _order),  # outermost first; axes that are not named lie anywhere
}  # fmt: skip


def read_fixed(text: str) -> tuple[str, Any]:
    """The field and the value of `tp=8`. Raises PlanError for anything else, with all that there is."""
    name, _, written = text.partition("=")
    value = WAYS[name].read(written) if name in WAYS else None
    if value is None:
        raise PlanError(f"--fix {text}: write {ways_text()}; axes are {', '.join(ORDER)}.")
    return name, value


def ways_text() -> str:
    """All that can be decided: `dp=N, ... or order=AXIS,AXIS,...`."""
    *first, last = (f"{name}={way.written}" for name, way in WAYS.items())
    return f"{', '.join(first)} or {last}"


def fixed_text(fixed: Mapping[str, Any]) -> str:
    """What is decided, as it would be written."""
    return ", ".join(f"{name}={_text(value)}" for name, value in fixed.items())


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
