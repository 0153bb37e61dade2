"""Batches of which each rank has a part: leaves in which samples lie elsewhere or nowhere, and how all are cut.

Tensor names carry their shape: B rows, T positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RANKS = 2  # that have parts: of the mesh dp=2
ROWS = 24  # of a batch: all meshes and micro-batches but a few divide them
# By kind, in which dim of x, y and a third argument samples lie.
ODD: Mapping[str, tuple[int | None, ...]] = {
    "mask": (0, 0, 1),  # [T, B]
    "positions": (0, 0, 1),  # [3, B, T]
    "time-major": (0, 1),  # y
    "shared": (0, 0, None),  # a coefficient for each position
    "as long by chance": (0, 0, None),  # as many numbers as an even part has rows
}


def third_of(kind: str, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The third argument of a batch, if it has one. shape: [B, T]."""
    rows, time = shape
    match kind:
        case "mask":
            return ((torch.rand(time, rows, generator=random) > 0.3).to(dtype),)
        case "positions":
            return (torch.randint(9, (3, rows, time), generator=random),)
        case "shared":
            return (torch.rand(time, generator=random, dtype=dtype),)
        case "as long by chance":
            return (torch.rand(ROWS // RANKS, generator=random, dtype=dtype),)
    return ()


def weighted(kind: str, error_BT: Tensor, third: Any) -> Tensor:
    """The mean of errors, as the third argument weighs them."""
    match kind:
        case "mask":
            return (error_BT * third.transpose(0, 1)).mean()
        case "positions":
            return (error_BT * (1 + third.sum(0))).mean()
        case "shared":
            return (error_BT * third).mean()
        case "as long by chance":
            return error_BT.mean() * third.square().sum()
    return error_BT.mean()


def part_of(setup: Mapping[str, Any], batch: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """What a rank has of the arguments of a step."""
    dims = itertools.chain(ODD.get(setup.get("odd", ""), ()), itertools.repeat(0))
    return tuple(cut(setup, leaf, dim, rank) for leaf, dim in zip(batch, dims, strict=False))


def cut(setup: Mapping[str, Any], leaf: Any, dim: int | None, rank: int) -> Any:
    """The rows of a rank of a tensor, and of what is none all of it."""
    if dim is None or not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    first = round(leaf.shape[dim] * setup["share"])
    return leaf.split([first, leaf.shape[dim] - first], dim)[rank].contiguous()
