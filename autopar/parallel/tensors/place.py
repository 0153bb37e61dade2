"""The place of a tensor that users hold: its ranks and its layout; gathers the global value, and cuts parts of it.

A `Place` is made once by its `World` for each layout and owner stage, so that two tensors lie alike if their places are
the same object.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autopar.errors import AutoparError, RankError
from autopar.ir.layout import Layout, combine_grid, local_shape, padded_shape, replicated
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.parallel.tensors.padding import beginning, padded_part, with_padding, without_padding
from autopar.runtime.ranks.distributed import all_gather_flat
from autopar.runtime.ranks.process_groups import forget_at_exit
from autopar.torch_compat import StridedShard, local_of, mesh_elsewhere
from autopar.torch_identity import GuardedSpec

_log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """All ranks: their mesh, the device mesh of each stage (by its coordinate on `pp`), and where this rank stands."""

    mesh: Mesh
    device_mesh: DeviceMesh
    stages: tuple[DeviceMesh, ...]
    coord: Mapping[str, int]
    announce: Callable[[str], None]
    seeded: bool = False  # the generators of all ranks stand alike, and so does what ranks compute of them
    _places: dict[tuple[Layout, int | None], Place] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    @staticmethod
    def of(mesh: Mesh, device_mesh: DeviceMesh, announce: Callable[[str], None]) -> World:
        """The world of this process; `announce` is told of each collective. Every rank must call this."""
        coord = mesh.coord(dist.get_rank())
        stages = _meshes_of_stages(mesh, device_mesh, coord[PIPELINE]) if PIPELINE in mesh else ()
        return World(mesh, device_mesh, stages, coord, announce)

    def alike(self) -> World:
        """This world while all ranks run one initialisation from one seed: what is plain or drawn is taken as equal."""
        return replace(self, seeded=True, _places={})

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage: the mesh without `pp`."""
        return Mesh(tuple((name, size) for name, size in self.mesh.axes if name != PIPELINE))

    @property
    def device(self) -> torch.device:
        """Where collectives take their tensors from."""
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def place(self, layout: Layout, owner: int | None = None) -> Place:
        """The one object for a layout and an owner stage (None: every stage)."""
        key = (layout, owner)
        if key not in self._places:
            self._places[key] = Place(self, layout, owner)
        return self._places[key]

    def everywhere(self, ndim: int) -> Place:
        """The place of what every rank holds whole."""
        return self.place(replicated(ndim))

    def warn(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)

    # -- collectives --------------------------------------------------------------------------------------------

    def talk(self, what: str | None) -> None:
        """Called just before each collective that a tensor makes outside of a step. `what` the user called; None where
        that call, which makes many, announced itself.

        Raises RankError on every rank if other ranks are in other calls."""
        if what is not None:
            self.announce(what)

    def gather_bytes(self, value: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has, of one shape and dtype on all."""
        size = self.mesh.size
        mine = _as_bytes(value.to(self.device))
        parts = mine.new_empty((size, mine.numel()))
        dist.all_gather(list(parts.unbind(0)), mine)
        return [_from_bytes(part, value) for part in parts.unbind(0)]

    def agree(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise RankError on every rank if plain tensors that are mixed with distributed ones differ between ranks."""
        if self.mesh.size == 1 or self.seeded or not tensors:
            return
        digests = [digest(tensor) for tensor in tensors]
        self.talk(what)
        everyone = torch.stack(self.gather_bytes(torch.tensor(digests, dtype=torch.int64, device="cpu")))
        different = (everyone != everyone[0]).any(1).nonzero().flatten().tolist()
        if different:
            mine = ", ".join(f"{list(tensor.shape)}" for tensor in tensors)
            raise RankError(
                f"'{what}' of a distributed tensor and a plain tensor of shape {mine}: the plain one must be the same "
                f"on every rank, but rank {', '.join(map(str, different))} has other values than rank 0. "
                f"Make it alike on all ranks (the same seed, or a broadcast); for data of each rank's own there is "
                f"`with model.gathered() as plain`."
            )


class PlacedSpec(GuardedSpec):
    """What torch knows of a tensor that users hold, but for its own ops on DTensors."""

    @staticmethod
    def refused() -> Exception:
        return AutoparError(
            "a DTensor that is not the model's stands before a tensor of the model in an op: torch would compute by "
            "placements, which do not say how the model's lies. Let the model's stand first, as in `parameter + other` "
            "for `other + parameter`, or make the other one its like: `torch.empty_like(parameter).copy_(other)`."
        )


@dataclass(frozen=True, eq=False)
class Place:
    """A layout over the mesh of `owner`, or over that of all ranks. Two are alike if they are the same object."""

    world: World
    layout: Layout
    owner: int | None
    _specs: dict[Any, Any] = field(default_factory=dict)
    _counting: dict[torch.Size, tuple[int, ...]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Place:
        return self

    @cached_property
    def mesh(self) -> Mesh:
        """The axes that the layout may name."""
        return self.world.mesh if self.owner is None else self.world.inner

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        return self.world.device_mesh if self.owner is None else self.world.stages[self.owner]

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds all elements."""
        return self.owner is None and self.layout.is_replicated

    @cached_property
    def is_here(self) -> bool:
        """True if this rank may hold elements."""
        return self.owner is None or self.owner == self.world.coord[PIPELINE]

    @cached_property
    def shown(self) -> tuple[Placement, ...]:
        """Placements for users: of a part that is no block of the whole, torch's own functions are told so."""
        return tuple(map(self._shown, self.placements))

    def _shown(self, placed: Placement) -> Placement:
        if isinstance(placed, StridedShard) and _is_fused(self.layout.dims[placed.dim]):
            return _Blocks(placed.dim, split_factor=placed.split_factor)
        return placed

    @cached_property
    def is_fused(self) -> bool:
        """True for a fused weight (`[3:tp,-]`), of which a rank's part is several blocks of the whole."""
        return any(map(_is_fused, self.layout.dims))

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placements for torch, one for each axis of the device mesh."""
        return tuple(placements(self.layout, self.mesh)) or (Replicate(),)

    def spec(self, part: torch.Tensor, shape: Sequence[int], stride: Sequence[int] | None = None) -> Any:
        """What torch knows of a tensor that lies here: one object for each shape, stride and dtype."""
        key = (tuple(shape), None if stride is None else tuple(stride), part.dtype)
        if key not in self._specs:
            if len(self._specs) > 4096:
                self._specs.clear()
            size = torch.Size(shape)
            stride = tuple(stride) if stride is not None else torch.empty(size, device="meta").stride()
            self._specs[key] = PlacedSpec.of(self.device_mesh, self.placements, size, stride, part.dtype)
        return self._specs[key]

    def like(self, ndim: int) -> Place:
        """The place of a value of other dims that goes with tensors here: this one, if it is whole in all of them."""
        return self if ndim == len(self.layout.dims) else self.world.everywhere(ndim)

    # -- parts and wholes ---------------------------------------------------------------------------------------

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, in memory of its own; empty on a rank of another stage."""
        if not self.is_here:
            return value.new_empty(0)
        part = padded_part(value, self.layout, self.mesh, self.world.coord)
        part = without_padding(part, tuple(value.shape), self.layout, self.mesh, self.world.coord)
        return part.clone(memory_format=torch.contiguous_format)

    def part_of_operand(self, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What goes, by broadcasting, with this rank's part of a tensor of `shape`."""
        if not value.ndim:
            return value
        dims = self.layout.dims[len(shape) - value.ndim :]
        sizes = shape[len(shape) - value.ndim :]
        kept = tuple(
            () if has == 1 and size != 1 else dim for dim, has, size in zip(dims, value.shape, sizes, strict=True)
        )
        return self.world.place(Layout(kept), self.owner).part(value)

    def gather(self, part: torch.Tensor, shape: torch.Size, what: str | None) -> torch.Tensor:
        """The whole value of which every rank holds its `part`; `part` itself where each holds all of it.

        Every rank must call this."""
        if self.is_replicated:
            return part
        if not shape.numel():
            return part.new_empty(shape)
        world, device = self.world, part.device
        axes = [axis for axis in self.mesh.names if axis in self.layout.axes]
        padded = local_shape(padded_shape(tuple(shape), self.layout, self.mesh), self.layout, self.mesh)
        world.talk(what)
        value = part.detach().to(world.device)
        if self.is_here:
            value = with_padding(value, tuple(shape), self.layout, self.mesh)
            grid = self._grid(_as_bytes(value), axes)
        else:
            count = math.prod(self.mesh[axis] for axis in axes)
            grid = torch.empty((count, math.prod(padded) * part.element_size()), dtype=torch.uint8, device=world.device)
        if self.owner is not None and world.mesh[PIPELINE] > 1:
            source = world.mesh.rank({**world.coord, PIPELINE: self.owner})
            dist.broadcast(grid, src=source, group=world.device_mesh.get_group(PIPELINE))
        made = self._combined(grid, value.new_empty(padded), axes)
        return beginning(made, tuple(shape)).contiguous().to(device)

    def _grid(self, mine: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The bytes of all ranks of some axes: a row for each coordinate."""
        if not axes:
            return mine.clone().unsqueeze(0)  # what leaves is memory of its own
        device_mesh, grid = self.world.device_mesh, mine
        if all(size == 1 or axis in axes for axis, size in self.world.mesh.axes):  # at once: nothing in between is kept
            grid = mine.new_empty(self.mesh.size, len(mine))
            all_gather_flat(grid.view(-1), mine)
            return grid
        for axis in reversed(axes):
            parts = grid.new_empty((self.mesh[axis], *grid.shape))
            all_gather_flat(parts.view(-1), grid.view(-1), group=device_mesh.get_group(axis))
            grid = parts
        return grid.reshape(-1, grid.shape[-1])

    def _combined(self, grid: torch.Tensor, like: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The whole padded value: the very memory of the grid where the parts are its rows in their order."""
        first, *rest = self.layout.dims or ((),)
        if not any(rest) and first == tuple(axes):
            return grid.view(-1).view(like.dtype).reshape(-1, *like.shape[1:]) if axes else _from_bytes(grid[0], like)
        split = Mesh(tuple((axis, self.mesh[axis]) for axis in axes))
        return combine_grid(grid.view(-1).view(like.dtype).reshape(len(grid), *like.shape), self.layout, split)

    def ranks_that_count(self, shape: torch.Size) -> tuple[int, ...]:
        """The ranks whose parts together are the whole, each element once; those with elements only."""
        if shape not in self._counting:
            self._counting[shape] = tuple(self._ranks_that_count(shape))
        return self._counting[shape]

    def _ranks_that_count(self, shape: torch.Size) -> list[int]:
        world = self.world
        ranks_that_count = []
        for rank, coord in enumerate(world.mesh.coords()):
            if self.owner is not None and coord[PIPELINE] != self.owner:
                continue
            if any(at and axis not in self.layout.axes for axis, at in coord.items() if axis != PIPELINE):
                continue
            if self.owner is None and coord.get(PIPELINE, 0) and PIPELINE not in self.layout.axes:
                continue
            if all(self._size_at(dim, size, coord) for dim, size in enumerate(shape)):
                ranks_that_count.append(rank)
        return ranks_that_count

    def _size_at(self, dim: int, size: int, coord: Mapping[str, int]) -> int:
        """How many of a dim's elements the rank at a coordinate has."""
        layout = Layout((self.layout.dims[dim],))
        positions = padded_part(torch.arange(1, size + 1, device="cpu"), layout, self.mesh, coord)
        return int((positions > 0).sum())


class _Blocks(StridedShard):
    """The placement of a part that is several blocks of the whole, for which some functions of torch take one block."""

    def _local_shard_size_and_offset(self, *args: Any, **options: Any) -> Any:
        shard = super()._local_shard_size_and_offset(*args, **options)
        if isinstance(shard[1], list):
            raise refused_blocks()
        return shard


def _is_fused(factors: Sequence[str | int]) -> bool:
    return any(isinstance(factor, int) for factor in factors)


def refused_blocks() -> AutoparError:
    """The error for a fused weight that torch would fill as one block."""
    return AutoparError(
        "a fused weight, of which a rank holds several blocks, cannot be filled as one block, as torch does with "
        "broadcast_from_rank0=True. Give every rank the whole state dict (full_state_dict=True alone), or load it by "
        "torch.distributed.checkpoint."
    )


def placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """A layout as DTensor placements, one for each mesh axis.

    torch splits a dim by one axis after the other in the order of the mesh. An axis that our layout has behind an
    integer, or behind an axis that is later in the mesh, splits each of so many pieces: a strided shard.
    """
    names = mesh.names
    placements: list[Placement] = [Replicate()] * len(names)
    for dim, factors in enumerate(layout.dims):
        for at, axis in enumerate(factors):
            if isinstance(axis, str):
                index = names.index(axis)
                outer = math.prod(
                    factor if isinstance(factor, int) else mesh[factor]
                    for factor in factors[:at]
                    if isinstance(factor, int) or names.index(factor) > index
                )
                placements[index] = Shard(dim) if outer == 1 else StridedShard(dim, split_factor=outer)
    return placements


def _meshes_of_stages(mesh: Mesh, device_mesh: DeviceMesh, mine: int) -> tuple[DeviceMesh, ...]:
    """The device mesh of each stage; its names are those without `pp`, or `pp` alone where there are no others."""
    names = tuple(name for name in mesh.names if name != PIPELINE)
    ranks = device_mesh.mesh.movedim(mesh.names.index(PIPELINE), 0)
    if not names:  # a mesh of this rank alone, with a group: torch's functions ask for one
        names, ranks = (PIPELINE,), ranks.reshape(-1, 1)
        device_mesh = DeviceMesh(device_mesh.device_type, ranks, mesh_dim_names=("stage", PIPELINE))
        forget_at_exit(device_mesh)
    meshes = []
    for owner, inside in enumerate(ranks):
        if owner == mine:
            meshes.append(device_mesh[names])
        else:
            meshes.append(mesh_elsewhere(device_mesh.device_type, inside.contiguous(), names))
    return tuple(meshes)


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: no backend has collectives for every dtype."""
    value = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    value = torch.view_as_real(value.resolve_conj()).reshape(-1) if value.is_complex() else value
    if value.stride(0) != 1:  # one element, of an expanded tensor
        value = value.clone(memory_format=torch.contiguous_format)
    return value.view(torch.uint8)


def _from_bytes(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse, of the shape and dtype of `like`."""
    return row.contiguous().view(like.dtype).reshape(like.shape)


def digest(tensor: torch.Tensor) -> int:
    """A number for shape, dtype and values."""
    text = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=7)
    text.update(_as_bytes(tensor.detach().cpu()).numpy().tobytes() if tensor.layout is torch.strided else b"")
    return int.from_bytes(text.digest(), "big")


__all__ = ["Place", "World", "local_of", "placements"]
