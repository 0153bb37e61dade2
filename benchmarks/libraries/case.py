"""A model of a package as its README builds it, small, with a batch of 12 rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 12  # what dp=3, and dp=2 with two micro-batches, divide


def anything(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """A loss of every float that a model returns, different in each element and each output."""
    return of_all(model(*args, **kwargs))


def of_all(out: Any) -> Tensor:
    found = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    total = found[0].new_zeros(())
    for i, leaf in enumerate(found):
        total = total + (leaf - 0.1 * (i + 1)).square().mean()
    return total


def leaves(out: Any) -> list[Any]:
    if isinstance(out, Mapping):
        return [leaf for value in out.values() for leaf in leaves(value)]
    if isinstance(out, (tuple, list)):
        return [leaf for value in out for leaf in leaves(value)]
    if hasattr(out, "__dataclass_fields__"):
        return leaves([getattr(out, name) for name in out.__dataclass_fields__])
    return [out]


@dataclass(frozen=True)
class Case:
    """A model and a batch: positional arguments, or keyword arguments by name. loss: of (model, *args, **kwargs)."""

    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    loss: Callable[..., Any] = anything


Build = Callable[[], Case]
Table = dict[str, dict[str, Build]]  # by the name of the distribution on PyPI, then by model


def image(size: int = 32, channels: int = 3, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, channels, size, size)


def tokens(length: int = 16, vocabulary: int = 64, rows: int = ROWS) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def sequence(length: int = 16, width: int = 32, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, length, width)


def convolutions(kind: Callable[..., nn.Module], channels: int) -> nn.Module:
    """To stand before what has no weights of its own: some that tp can split."""
    return nn.Sequential(kind(channels, 8, 3, padding=1), kind(8, channels, 3, padding=1))
