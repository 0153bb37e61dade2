"""A job's batch at other sizes, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture.inputs.containers import map_tensors, take_call_apart
from autopar.compiler.compile import batch_arguments
from autopar.errors import BatchError


def sizes_of(batch: Any) -> dict[str, int]:
    """b, the rows of the first tensor, and s, the second dim of the first tensor of integers."""
    return sizes_of_call(*batch_arguments(batch))


def sizes_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the arguments of a call (see `sizes_of`)."""
    sizes: dict[str, int] = {}
    for _, leaf in take_call_apart(args, kwargs).tensors():
        if leaf.ndim:
            sizes.setdefault("b", leaf.shape[0])
            if leaf.ndim == 2 and not leaf.is_floating_point() and leaf.shape[0] == sizes["b"]:
                sizes.setdefault("s", leaf.shape[1])
    return sizes


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The rows of a batch. Raises BatchError for one that has none."""
    sizes = sizes_of_call(args, kwargs)
    if "b" not in sizes:
        raise BatchError("a plan divides the rows of the batch, and this batch has no tensor with a dim.")
    return sizes["b"]


def rows_of_batch(batch: Any) -> int:
    """The rows of a job's batch (see `rows_of`)."""
    return rows_of(*batch_arguments(batch))


def resized(batch: Any, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a batch with other sizes (`sizes_of`), of which those that are not named stay."""
    return resized_call(*batch_arguments(batch), sizes)


def resized_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the arguments of a call other sizes (see `resized`)."""
    example = sizes_of_call(args, kwargs)

    def resize(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.ndim or leaf.shape[0] != example["b"]:
            return leaf
        shape = [sizes.get("b", example["b"]), *leaf.shape[1:]]
        if "s" in sizes and leaf.ndim > 1 and shape[1] == example.get("s"):
            shape[1] = sizes["s"]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    resized_call: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(resize, (tuple(args), dict(kwargs)))
    return resized_call
