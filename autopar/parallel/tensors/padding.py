"""Pad tensors that their axes do not divide: in programs, and never where users see them.

As in `torch.chunk` and DTensor, every rank but the last ones has ceil(size / ranks) of a dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from autopar.ir.layout import Layout, local_part, local_shape, padded_shape
from autopar.ir.mesh import Mesh


def pad_to(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`value` with zeros after it on each dim, up to `shape`; itself if it has that shape."""
    if tuple(value.shape) == tuple(shape):
        return value
    missing = [wanted - has for wanted, has in zip(shape, value.shape, strict=True)]
    return functional.pad(value, [edge for more in reversed(missing) for edge in (0, more)])


def padded_part(value: torch.Tensor, layout: Layout, mesh: Mesh, coord: Mapping[str, int]) -> torch.Tensor:
    """The part of a whole value that the program of the rank at `coord` takes."""
    return local_part(pad_to(value, padded_shape(tuple(value.shape), layout, mesh)), layout, mesh, coord)


def without_padding(
    part: torch.Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, coord: Mapping[str, int]
) -> torch.Tensor:
    """What a program's part holds of a value of `shape`: `part` itself, or the beginning of it."""
    padded = padded_shape(tuple(shape), layout, mesh)
    if padded == tuple(shape):
        return part
    local = local_shape(padded, layout, mesh)
    for dim, (size, most, factors) in enumerate(zip(shape, local, layout.dims, strict=True)):
        if padded[dim] != size:
            (axis,) = factors  # nothing else is padded, see passes/collectives/zero.py
            assert isinstance(axis, str)
            part = part.narrow(dim, 0, max(0, min(most, size - coord[axis] * most)))
    return part.contiguous()


def with_padding(part: torch.Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The inverse of `without_padding`, on any rank."""
    return pad_to(part, local_shape(padded_shape(tuple(shape), layout, mesh), layout, mesh))


def beginning(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole padded tensor without its padding: of `shape`, or itself if it is no larger."""
    if len(shape) != value.ndim or tuple(value.shape) == tuple(shape):
        return value
    return value[tuple(slice(size) for size in shape)]
