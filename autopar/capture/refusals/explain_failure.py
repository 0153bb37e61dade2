"""Explain a failed capture in the user's terms: the line, what stands there, and what to write instead."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture.refusals.constructs import (
    BRANCHES,
    CALLED,
    FAILURES,
    INTEGER,
    OTHER_READ,
    READS,
    SIZES,
    TOLIST,
    UNCALLED,
    Construct,
)
from autopar.capture.refusals.location import Line, Locator, is_typed, is_user_file
from autopar.capture.refusals.user_lines import quoted
from autopar.errors import CaptureError
from autopar.ir.ops.op_facts import creates, overloads_of

SPECIALIZE = "\nOr specialize=True takes the value from the example batch, and checks at each step that it still holds."
SIZE = "DynamicOutputShape"  # a result whose size is data
_READ = (
    "DataDependent", "GuardOnDataDependent", "trying to get value out of a tracing tensor", ".numpy() is not supported",
    ".tolist() is not supported", "data is not allocated yet",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepCall:
    """What was called: the model, or a loss function with it, and the batch it was called with."""

    model: nn.Module
    loss_fn: Any
    gives_loss: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def advice(self, error: Exception, line: Line | None) -> str:
        """Say how it is called, where it could not be called, or took what it was given for something else."""
        if not isinstance(error, (TypeError, AttributeError)):
            return ""
        said = list[str]()
        if self.gives_loss and (line is None or type(self.model).__name__ in str(error)):
            said += [CALLED] if self.loss_fn is not None else [UNCALLED] * (line is None)
        one = self.args[0] if len(self.args) == 1 and not self.kwargs else None
        if isinstance(one, (tuple, list, Mapping)) and (line is None or type(one).__name__ in str(error)):
            stars = "**batch" if isinstance(one, Mapping) else "*batch"
            said.append(f"The batch came as one {type(one).__name__}: {stars} gives what is in it one by one.")
        return "".join(f"\n{each}" for each in said)


def explain(error: Exception, calling: Any, locator: Locator, may_specialize: bool, call: StepCall) -> CaptureError:
    """`calling` is the torch function that failed, if one did; `may_specialize`: for want of a value that
    `specialize=True` would take."""
    line = line_of(error) or _typed_line(error) or locator.backward_line
    where = f"at {quoted(line)}" if line else "at the call itself:\n"
    text = f"{type(error).__name__}: {error}"
    by_size = SIZE in text
    if by_size or any(mark in text for mark in _READ):
        construct = _of_size(calling) if by_size else _of_read(calling, line)
        offer = SPECIALIZE if may_specialize else ""
        return CaptureError(f"the program depends on the values in a tensor {where}{_said(construct)}{offer}")
    first = str(error).strip().split("\n")[0].partition(" Hint: ")[0][:500]
    raised = f"{type(error).__name__}: {first}" if first else f"{type(error).__name__}, without a text"
    raised = raised.replace("FakeTensor", "Tensor")
    for pattern, construct in () if _raised_by_user(error) else FAILURES:
        if pattern.search(text):
            return CaptureError(f"the model cannot be captured, {where}{_said(construct)}\n(torch says: {raised})")
    return CaptureError(f"the model failed on the example batch, {where}{raised}{call.advice(error, line)}")


def wants_data(error: Exception) -> bool:
    """True for what torch says where a capture, whose tensors have no data, would need it."""
    text = f"{type(error).__name__}: {error}"
    return any(mark in text for mark in (SIZE, *_READ))


def refusal(construct: Construct, line: Line | None) -> CaptureError:
    """Make the error for what is known to be wrong when it is met."""
    where = f"at {quoted(line)}" if line else "at an unknown line:\n"
    return CaptureError(f"the model cannot be captured, {where}{_said(construct)}")


def size_refusal(construct: Construct, line: Line | None, may_specialize: bool) -> CaptureError:
    """Make the error for a result whose size is data."""
    where = f"at {quoted(line)}" if line else "at an unknown line:\n"
    offer = SPECIALIZE if may_specialize else ""
    return CaptureError(f"the program depends on the values in a tensor {where}{_said(construct)}{offer}")


def read_refusal(construct: Construct, line: Line | None, may_specialize: bool, why: str) -> CaptureError:
    """Make the error for a value that is read from a tensor, and used so that a tensor would not do."""
    return size_refusal(Construct(construct.name, f"{construct.instead} {why}"), line, may_specialize)


def line_of(error: Exception) -> Line | None:
    """The innermost line of the user's that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([frame for frame in frames if is_user_file(frame.filename)])


def _raised_by_user(error: Exception) -> bool:
    """True for an exception of the user's own, whose text is the message."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return is_user_file(last.filename) and (last.line or "").startswith("raise")


def _typed_line(error: Exception) -> Line | None:
    """Find the line in code that stands in no file, of a prompt or exec; torch has some before the model runs: outside
    of `tables.functional_call`."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((i for i, frame in enumerate(frames) if frame.name == "functional_call"), 0)
    return _innermost([frame for frame in frames[start:] if is_typed(frame.filename)])


def _innermost(frames: list[traceback.FrameSummary]) -> Line | None:
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else None


def _said(construct: Construct) -> str:
    return f"This line has {construct.name}. {construct.instead}"


def _of_size(calling: Any) -> Construct:
    return SIZES.get(calling, OTHER_READ)


def _of_read(calling: Any, line: Line | None) -> Construct:
    """A bool of a tensor is many things in a source; they are told apart by the text of the line."""
    text = linecache.getline(*line).strip() if line else ""
    known = TOLIST if ".tolist(" in text else READS.get(calling)
    name = getattr(calling, "__name__", "")
    if known is not None or name != "__bool__":
        return known or (INTEGER if any(map(creates, overloads_of(name))) else OTHER_READ)
    return next(construct for pattern, construct in BRANCHES if pattern.search(text))
