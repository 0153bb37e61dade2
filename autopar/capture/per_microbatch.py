"""A value of each micro-batch by itself, of which a loss takes the mean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from autopar.capture.inputs.containers import map_tensors, take_apart
from autopar.capture.ops.functions import InMicrobatches
from autopar.capture.refusals.location import Line, user_frame
from autopar.capture.refusals.user_lines import quoted
from autopar.errors import BatchError, CaptureError

Tensor = torch.Tensor


def per_microbatch(function: Callable[..., Any], *rows: Any) -> Any:
    """Take the mean over micro-batches of `function(*rows)` of each, as trainers do that know one of them at a time.

    A step of autopar has the loss of the whole batch, whatever the mesh. Some losses mean another one: the mean of what
    each micro-batch gives by itself. So are the balance losses of Megatron-LM and torchtitan, means over the tokens
    that are not masked in a micro-batch, contrastive losses with the negatives of a micro-batch:

        balance = autopar.per_microbatch(load_balance, router_logits, mask)
        loss = autopar.per_microbatch(lambda x, y: F.cross_entropy(x, y, ignore_index=-100), logits, labels)

    rows: tensors, also in lists, tuples or dicts, whose dim 0 holds the samples in the order of the batch, or some
      rows of each (all its tokens, sample after sample). `function` gets those of one micro-batch of one data rank,
      and gives a tensor or a container of tensors, whose means are returned. It runs under torch.vmap: shapes may not
      hang on values. What it closes over is the same for all micro-batches.

    On one device without micro-batches, and outside of a parallel step, this is `function(*rows)`. Since such values
    couple no micro-batches, every schedule can run them.

    Raises CaptureError where no tensor is given, or one without rows, and BatchError at the first step where the rows
    of a tensor are not samples, each from one micro-batch.
    """
    tensors = [*take_apart(rows).tensors()]
    if not tensors:
        raise CaptureError(f"autopar.per_microbatch{_here()}It was given no tensor: it needs a row for each sample.")
    for i, tensor in tensors:
        if not tensor.ndim:
            raise CaptureError(
                f"autopar.per_microbatch{_here()}It was given a tensor without dims (number {i}). Give it a row for "
                f"each sample, or let the function close over it."
            )
    parts = map_tensors(in_microbatches, rows)
    counts = {len(tensor) for _, tensor in take_apart(parts).tensors()}
    if counts == {1}:
        return function(*map_tensors(lambda tensor: tensor[0], parts))
    values = torch.vmap(function)(*parts)
    return map_tensors(lambda tensor: tensor.mean(0), values)


def in_microbatches(tensor: Tensor) -> Tensor:
    """A tensor as [micro-batches, rows of each, ...]; one micro-batch where no step is traced."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(in_microbatches, (tensor,), tensor)  # type: ignore[no-any-return]
    return tensor[None]


def dealt(tensor: Tensor, count: int) -> Tensor:
    """A tensor of a trace as [micro-batches, rows of each, ...]; as one micro-batch where that cannot be."""
    return InMicrobatches.apply(tensor, 1 if len(tensor) % count else count)  # type: ignore[no-any-return]


def dealt_plainly(tensor: Tensor, count: int, line: Line | None) -> Tensor:
    """A tensor of the plain module as [micro-batches, rows of each, ...]."""
    if len(tensor) % count:
        where = f" at {quoted(line)}" if line else ":\n"
        raise BatchError(f"autopar.per_microbatch{where}{len(tensor)} rows are not those of {count} micro-batches.")
    return tensor.reshape(count, -1, *tensor.shape[1:])


def _here() -> str:
    """Where the user calls it."""
    line = user_frame(sys._getframe(2))
    return f" at {quoted(line)}" if line else ":\n"
