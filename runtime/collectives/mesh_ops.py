"""The maths of the mesh ops for one rank, shared by the drivers.

A dim that an axis of n ranks splits is (outer, n, rest) when whole and (outer, rest) on each rank. `pieces` and
`join` go between the whole dim and a leading dim of n, which is what communication libraries split. A negative outer:
in every second of -outer places the n stand in reverse.
An axis may be several, joined by ":" ("dp:cp"): their ranks as one group, the first axis slowest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from autopar.ir.layout import cut_out, mirrored
from autopar.ir.mesh import SLICE, Mesh, axes_of_group, group_name
from autopar.ir.ops.ops import op
from autopar.runtime.collectives.rows_to_owners import order_by_owner, owned_index, tokens_by_owner

SHARD, KEEP_FIRST, COORD = op("shard"), op("keep_first"), op("coord")
ORDER, OWNED_INDEX, TOKENS = op("order_by_owner"), op("owned_index"), op("tokens_by_owner")
WAIT = op("wait")


def axis_coord(mesh: Mesh, coord: Mapping[str, int], axis: str) -> int:
    """The place of the rank at `coord` in its group."""
    place = 0
    for name in axes_of_group(axis):
        place = place * mesh[name] + coord[name]
    return place


def axis_group(mesh: Mesh, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from `rank` only on the axis (or axes), in order of their place."""
    coord, names = mesh.coord(rank), axes_of_group(axis)
    points = itertools.product(*(range(mesh[name]) for name in names))
    return tuple(mesh.rank({**coord, **dict(zip(names, point, strict=True))}) for point in points)


def axis_groups(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """The groups of all ranks along the axis (or axes), as of `axis_group`, sorted."""
    along = [mesh.names.index(name) for name in axes_of_group(axis)]
    others = [dim for dim in range(len(mesh.names)) if dim not in along]
    ranks = torch.arange(mesh.size, device="cpu").view(mesh.shape).permute(*others, *along)
    size = math.prod(mesh[name] for name in axes_of_group(axis))
    return sorted(map(tuple, ranks.reshape(-1, size).tolist()))


def pieces(x: torch.Tensor, count: int, dim: int, outer: int) -> torch.Tensor:
    """[..., (outer count rest), ...] -> [count, ..., (outer rest), ...]; a view where strides allow."""
    blocks = abs(outer)
    rest = x.shape[dim] // (blocks * count)
    assert blocks * count * rest == x.shape[dim], (tuple(x.shape), dim, outer, count)
    if outer == 1:
        return x.unflatten(dim, (count, rest)).movedim(dim, 0)
    x = x.unflatten(dim, (blocks, count, rest))
    return (mirrored(x, dim) if outer < 0 else x).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def join(parts: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """[count, ..., (outer rest), ...] -> [..., (outer count rest), ...]: the inverse of `pieces`."""
    blocks = abs(outer)
    rest = parts.shape[dim + 1] // blocks
    assert blocks * rest == parts.shape[dim + 1], (tuple(parts.shape), dim, outer)
    x = parts.unflatten(dim + 1, (blocks, rest)).movedim(0, dim + 1)
    return (mirrored(x, dim) if outer < 0 else x).flatten(dim, dim + 2)


def shard(x: torch.Tensor, size: int, place: int, dim: int, outer: int) -> torch.Tensor:
    """The piece of a whole dim at `place` of `size`: a view, but for mirrored ones."""
    if outer >= 0:
        return pieces(x, size, dim, outer)[place]
    even, odd = x.unflatten(dim, (-outer // 2, 2, size, -1)).unbind(dim + 1)
    found = torch.stack([even.select(dim + 1, place), odd.select(dim + 1, size - 1 - place)], dim + 1)
    return found.flatten(dim, dim + 2)


def laid_side_by_side(parts: Sequence[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """Join parts that may differ in length: those of slices."""
    if len({part.shape for part in parts}) == 1:
        return join(torch.stack(list(parts)), dim, outer)
    return torch.cat([part.unflatten(dim, (outer, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def keep_first(x: torch.Tensor, place: int) -> torch.Tensor:
    """x on the first rank of the group, zeros elsewhere, so that the sum over the group is x."""
    return x if place == 0 else torch.zeros_like(x)


def local_answer(mesh: Mesh, coord: Mapping[str, int], target: object, args: tuple[object, ...]) -> object:
    """The result of a mesh op in which nothing moves. Where slices of a sequence differ in
    length, the coordinate of one is where it begins, in units that the lengths of all are multiples of."""
    if target == COORD:
        (axis,) = args
        assert isinstance(axis, str)
        if axis == SLICE and mesh.lengths:
            return sum(mesh.lengths[: coord[axis]]) // mesh.granule
        return axis_coord(mesh, coord, axis)
    x, axis, *rest = args
    assert isinstance(x, torch.Tensor) and isinstance(axis, str)
    place = axis_coord(mesh, coord, axis)
    if target == KEEP_FIRST:
        return keep_first(x, place)
    if target == ORDER:
        return order_by_owner(x, mesh[axis], *rest)  # type: ignore[arg-type]
    if target == TOKENS:
        return tokens_by_owner(x, mesh[axis], *rest)  # type: ignore[arg-type]
    if target == OWNED_INDEX:
        counts, bound = rest
        assert isinstance(counts, torch.Tensor) and isinstance(bound, int)
        return owned_index(x, mesh[axis], place, counts, bound)
    assert target == SHARD, target
    dim, outer = rest
    assert isinstance(dim, int) and isinstance(outer, int)
    if mesh.lengths and SLICE in axes_of_group(axis):
        *others, last = axes_of_group(axis)
        assert last == SLICE and outer > 0, args
        x = local_answer(mesh, coord, SHARD, (x, group_name(others), dim, outer)) if others else x
        assert isinstance(x, torch.Tensor)
        return cut_out(x, dim, outer, mesh, coord[SLICE])
    return shard(x, mesh[axis], place, dim, outer)


def is_local(target: object) -> bool:
    return target in (SHARD, KEEP_FIRST, COORD, ORDER, OWNED_INDEX, TOKENS)
