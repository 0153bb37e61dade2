"""Check what a step leaves in the buffers of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.user_lines import line_that_changes


def check_buffers(
    old: Mapping[str, torch.Tensor], new: Iterable[tuple[str, torch.Tensor]], run: Callable[[], object],
    find: Callable[[str], torch.Tensor],
) -> None:  # fmt: skip
    """Raise CaptureError for a buffer that a program cannot leave behind. run: makes another run, so that the line is
    found that does it. find: a buffer as it is by then."""
    for name, tensor in new:
        fault = buffer_fault(name, old[name], tensor)
        if fault is not None:
            raise refusal(fault, line_that_changes(run, lambda name=name: form_of(find(name))))  # type: ignore[misc]


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a buffer must keep."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def buffer_fault(name: str, old: torch.Tensor, new: torch.Tensor) -> Construct | None:
    """What is wrong with the new value of a buffer."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
        return Construct(
            f"a buffer '{name}' of another form ({was} before the step, {now} after it)",
            "A program is compiled for one form: make the buffer of its full size in __init__ and write into a part of "
            "it, or pass it in with the batch.",
        )
    if new.grad_fn is not None and not old.requires_grad:  # a leaf is but marked, and holds what it held
        return Construct(
            f"a buffer '{name}' whose new value has a gradient",
            "Its graph is gone in the next step: write x.detach() into it, under torch.no_grad().",
        )
    return None
