"""Find tensors that have elements in common: a write to one of them is seen in the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_compat import storage_of

Told = TypeVar("Told")  # what is said of a tensor


def overlapping(
    entries: Iterable[tuple[Told, torch.Tensor]],
) -> Iterator[tuple[tuple[Told, torch.Tensor], tuple[Told, torch.Tensor]]]:
    """Give the pairs of tensors that have elements in common."""
    by_storage: dict[int, list[tuple[Told, torch.Tensor]]] = defaultdict(list)
    for entry, tensor in entries:
        storage = None if isinstance(tensor, DTensor) else storage_of(tensor)
        if storage is not None and tensor.device.type != "meta" and tensor.numel():
            by_storage[storage].append((entry, tensor))
    for alike in (tensors for tensors in by_storage.values() if len(tensors) > 1):
        ranges = sorted((*_range(tensor), at) for at, (_, tensor) in enumerate(alike))
        for i, (_, end, at) in enumerate(ranges):  # of thousands of parts of one memory few lie in each other
            near = takewhile(lambda other, end=end: other[0] < end, ranges[i + 1 :])  # type: ignore[misc]
            pairs = (sorted((at, its)) for _, _, its in near)
            yield from ((alike[a], alike[b]) for a, b in pairs if _meet(alike[a][1], alike[b][1]))


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that lie in one range of a memory have an element in common."""
    (start, end), (its_start, its_end) = _range(one), _range(other)
    are_dense = one.numel() * one.itemsize == end - start and other.numel() * other.itemsize == its_end - its_start
    if are_dense or one.dtype != other.dtype:  # columns that lie between each other have one dtype
        return True
    taken = torch.zeros(max(end, its_end) // one.itemsize, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), int(one.storage_offset())).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), int(other.storage_offset())).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory that a tensor lies within."""
    start = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (start + reach + 1) * tensor.itemsize
