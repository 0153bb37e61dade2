"""What a rank was given of a batch of which every rank has a part (batch="local"), and the whole that the parts are.

The whole batch is the parts put together on the dim that counts the samples, in the order of the ranks' data
coordinates. Where a program wants of a tensor what this rank was given, nothing moves. Else, as where ranks have
unlike numbers of samples, the tensor is gathered, and each rank takes its part of the whole: the step is then that of
the whole batch, whatever the model does with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.inputs.batch_dims import Dims, ask, spelled
from autopar.capture.inputs.containers import Parts
from autopar.capture.inputs.leaves import without_data
from autopar.errors import BatchError, one_of
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.search.intents import INTENTS
from autopar.runtime.ranks.distributed import all_gather_flat

Sizes = tuple[int, ...]  # of the leaves that have samples, in their order


@dataclass(frozen=True, slots=True)
class BatchWorld:
    """Where the parts lie: the axes that split the batch, and this rank's place among their coordinates."""

    mesh: Mesh
    device_mesh: DeviceMesh
    axes: tuple[str, ...]
    place: int

    @staticmethod
    def of(mesh: Mesh, device_mesh: DeviceMesh, coord: Mapping[str, int]) -> BatchWorld:
        axes = tuple(axis for axis in data_part(coord) if mesh[axis] > 1)
        return BatchWorld(mesh, device_mesh, axes, place_of(mesh, coord))

    @property
    def places(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.axes)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What the ranks of each place have, of one shape and dtype. Every rank must call this."""
        grid = part.contiguous().reshape(-1).view(torch.uint8)
        for axis in reversed(self.axes):
            parts = grid.new_empty(self.mesh[axis] * grid.numel())
            all_gather_flat(parts, grid.view(-1), group=self.device_mesh.get_group(axis))
            grid = parts
        return [one.view(part.dtype).reshape(part.shape) for one in grid.view(self.places, -1).unbind(0)]


@dataclass(frozen=True, slots=True)
class Portion:
    """This rank's part. dims: by leaf; None for what all ranks share. sizes: by place. is_said: by the user, else
    found. is_agreed: the sizes are known, and not those of this rank taken for all. is_own: the ranks of each place
    compute a batch of their own; then sizes are of all dims, and nothing is shared."""

    dims: Dims
    sizes: tuple[Sizes, ...]
    place: int
    is_said: bool
    is_agreed: bool = False
    is_own: bool = False

    @staticmethod
    def of(parts: Parts, dims: Dims, world: BatchWorld, is_said: bool) -> Portion:
        """Assume that all ranks have as many samples as this one."""
        own = tuple(parts.leaves[i].shape[dim] for i, dim in enumerate(dims) if dim is not None)
        return Portion(dims, (own,) * world.places, world.place, is_said)

    @staticmethod
    def own(parts: Parts, world: BatchWorld) -> Portion:
        """A batch that is this rank's alone."""
        sizes = tuple(size for _, leaf in parts.tensors() for size in leaf.shape)
        return Portion((None,) * len(parts.leaves), (sizes,) * world.places, world.place, True, is_own=True)

    @property
    def leaves(self) -> list[int]:
        """The leaves that have samples."""
        return [i for i, dim in enumerate(self.dims) if dim is not None]

    def shared(self, parts: Parts) -> frozenset[int]:
        """The leaves that all ranks have alike."""
        return frozenset(i for i, _ in parts.tensors() if self.dims[i] is None and not self.is_own)

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def counts(self, leaf: int) -> list[int]:
        """The samples of a leaf, by place."""
        at = self.leaves.index(leaf)
        return [sizes[at] for sizes in self.sizes]

    def whole(self, parts: Parts) -> Parts:
        """The whole batch, of which what has samples is on the meta device."""
        leaves = list(parts.leaves)
        for leaf in self.leaves:
            shape = list(leaves[leaf].shape)
            shape[self.dims[leaf]] = sum(self.counts(leaf))  # type: ignore[index]
            leaves[leaf] = without_data(leaves[leaf], shape)
        return replace(parts, leaves=tuple(leaves))

    def line(self) -> str:
        """What other ranks may have otherwise, as ranks compare it."""
        return _SAMPLES + json.dumps(self.sizes if self.is_agreed else self.sizes[self.place])

    def settled(self, everyone: Sequence[Sequence[str]], mesh: Mesh) -> Portion | None:
        """The portion with the sizes that all ranks say; None if these are not what ranks differ in. everyone: the
        lines of each rank, of which one is this one's `line`. All else is compared with these sizes once more: which
        program a rank found for its own size says nothing."""
        found = [[json.loads(line.removeprefix(_SAMPLES)) for line in lines if _is_samples(line)] for lines in everyone]
        if self.is_agreed or any(len(said) != 1 or len(said[0]) != len(found[0][0]) for said in found):
            return None
        by_place: dict[int, Sizes] = {}
        for coord, (sizes,) in zip(mesh.coords(), found, strict=True):
            if by_place.setdefault(place_of(mesh, coord), tuple(sizes)) != tuple(sizes):
                return None  # ranks that pass the same part
        sizes = tuple(by_place[place] for place in range(len(self.sizes)))
        return None if sizes == self.sizes else replace(self, sizes=sizes, is_agreed=True)

    def part(self, value: torch.Tensor, leaf: int, dim: int, outer: int) -> torch.Tensor:
        """This rank's rows of a value that has those of the whole batch at (dim, outer)."""
        counts = self.counts(leaf)
        begin, count = sum(counts[: self.place]), counts[self.place]
        rows = value.unflatten(dim, (outer, sum(counts), -1)).narrow(dim + 1, begin, count)
        return rows.flatten(dim, dim + 2).clone(memory_format=torch.contiguous_format)

    def gathered(self, leaf: int, own: torch.Tensor, world: BatchWorld) -> torch.Tensor:
        """The whole of a tensor of which each rank has its own part. Every rank must call this."""
        dim, counts = self.dims[leaf], self.counts(leaf)
        assert dim is not None
        most = max(counts)
        rows = own.movedim(dim, 0)
        padded = rows if len(rows) == most else torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        parts = world.gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).movedim(0, dim)

    def fits(self, leaf: int, layout: Layout, world: BatchWorld) -> bool:
        """Whether a program wants of a tensor what this rank was given, or a part of that."""
        factors = layout.dims[self.dims[leaf] or 0]
        own = [f for f in factors if not (isinstance(f, str) and f in world.mesh and world.mesh[f] == 1)]
        begins = tuple(own[: len(world.axes)]) == world.axes
        return begins and self.is_even and sum(axis in world.axes for axis in layout.axes) == len(world.axes)

    def within(self, layout: Layout, world: BatchWorld) -> Layout:
        """A layout within what a rank was given."""
        return Layout(tuple(tuple(f for f in dim if f not in world.axes) for dim in layout.dims))


_SAMPLES = "samples "


def _is_samples(line: str) -> bool:
    return line.startswith(_SAMPLES)


def place_of(mesh: Mesh, coord: Mapping[str, int]) -> int:
    """The place of a rank among those that have other parts of the batch."""
    place = 0
    for axis, at in data_part(coord).items():
        place = place * mesh[axis] + at
    return place


def found_dims(parts: Parts) -> Dims:
    """By leaf the dim that counts samples, as shapes look: whether it is so the program says (`portions.py`).

    It has the size that most tensors have in front, and of two such the one that more tensors have at all. What has no
    dim of that size is shared. Raises BatchError where two sizes are as good.
    """
    tensors = [(i, leaf) for i, leaf in parts.tensors() if leaf.ndim]
    fronts = [leaf.shape[0] for _, leaf in tensors]
    votes = {size: (fronts.count(size), sum(size in leaf.shape for _, leaf in tensors)) for size in fronts}
    best = [size for size, count in votes.items() if count == max(votes.values())]
    if len(best) > 1:
        shapes = ", ".join(f"{parts.paths[i]} {list(leaf.shape)}" for i, leaf in tensors)
        raise BatchError(
            f'batch="local" puts the parts of all ranks together on the dim that counts samples, and the shapes do not '
            f"tell which it is: of {shapes} it may be that of {one_of(best)}. {ask(parts)}"
        )
    dims: list[int | None] = [None] * len(parts.leaves)
    for i, leaf in tensors:
        dims[i] = next((dim for dim, size in enumerate(leaf.shape) if size in best), None)
    return tuple(dims)


def same_again(dims: Dims, parts: Parts) -> None:
    """Raise BatchError if tensors whose samples were found by an earlier call do not have equally many in this one."""
    sizes = {i: parts.leaves[i].shape[dim] for i, dim in enumerate(dims) if dim is not None}
    if len(set(sizes.values())) > 1:
        shapes = ", ".join(f"{size} in dim {dims[i]} of {parts.paths[i]}" for i, size in sizes.items())
        raise BatchError(
            f'batch="local" took these dims for those that count samples, since they were alike in an earlier call; '
            f"now there are {shapes}. If that is meant, say so: {spelled(parts, dims)}."
        )


def data_part(coord: Mapping[str, int]) -> dict[str, int]:
    """The coordinate on the axes that split the batch."""
    return {axis: place for axis, place in coord.items() if axis in INTENTS and INTENTS[axis].batch_split}
