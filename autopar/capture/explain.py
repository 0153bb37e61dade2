"""A failed capture in the user's terms: the line, what stands there, and what to write instead."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

from autopar.capture.constructs import BRANCHES, FAILURES, OTHER_READ, READS, SIZES, Construct
from autopar.capture.lines import quoted
from autopar.capture.location import Line, Locator, is_typed, is_user_file
from autopar.errors import CaptureError

_SIZE = ("DynamicOutputShape",)
_READ = (
    "DataDependent", "GuardOnDataDependent", "trying to get value out of a tracing tensor", ".numpy() is not supported",
)  # fmt: skip


def explain(error: Exception, calling: Any, locator: Locator) -> CaptureError:
    """`calling` is the torch function that failed, if one did."""
    line = line_of(error) or locator.backward_line
    where = f"at {quoted(line)}" if line else "at the call itself:\n"
    text = f"{type(error).__name__}: {error}"
    by_size = any(mark in text for mark in _SIZE)
    if by_size or any(mark in text for mark in _READ):
        construct = _of_size(calling) if by_size else _of_read(calling, line)
        return CaptureError(f"the program depends on the values in a tensor {where}{_said(construct)}")
    first = str(error).strip().split("\n")[0][:500]
    raised = f"{type(error).__name__}: {first}" if first else f"{type(error).__name__}, without a text"
    for pattern, construct in FAILURES:
        if pattern.search(text):
            return CaptureError(f"the model cannot be captured, {where}{_said(construct)}\n(torch says: {raised})")
    return CaptureError(f"the model failed on the example batch, {where}{raised}")


def refusal(construct: Construct, line: Line | None) -> CaptureError:
    """Of what is known to be wrong when it is met."""
    where = f"at {quoted(line)}" if line else "at an unknown line:\n"
    return CaptureError(f"the model cannot be captured, {where}{_said(construct)}")


def line_of(error: Exception) -> Line | None:
    """The innermost line of the user's that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if is_user_file(f.filename)] or [f for f in frames if is_typed(f.filename)]
    return (found[-1].filename, found[-1].lineno or 0) if found else None


def _said(construct: Construct) -> str:
    return f"This line has {construct.name}. {construct.instead}"


def _of_size(calling: Any) -> Construct:
    return SIZES.get(calling, OTHER_READ)


def _of_read(calling: Any, line: Line | None) -> Construct:
    """A bool of a tensor is many things in a source; they are told apart by the text of the line."""
    known = READS.get(calling)
    if known is not None or getattr(calling, "__name__", "") != "__bool__":
        return known or OTHER_READ
    text = linecache.getline(*line).strip() if line else ""
    return next(construct for pattern, construct in BRANCHES if pattern.search(text))
