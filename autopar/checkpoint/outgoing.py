"""Which rank writes which piece of a tensor: each element once, replicas taking turns; and what a load fills."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.checkpoint.manifest import SavedBlock, SavedTensor
from autopar.checkpoint.tensor_files import DTYPES, bytes_of, stored
from autopar.errors import CheckpointError
from autopar.ir.mesh import PIPELINE
from autopar.parallel.tensors.held_blocks import blocks
from autopar.parallel.tensors.place import Place
from autopar.parallel.tensors.placed import PlacedTensor, ViewOf
from autopar.torch_compat import local_of


@dataclass(slots=True)
class Outgoing:
    """The tensors of a checkpoint, and this rank's pieces of them. Every rank meets the same tensors in the same order,
    so that each knows who writes what.

    staging: memory of the host that pieces are copied to, for a file that is written later: by their keys, kept from
    save to save, since fresh memory costs more than the copy. None: pieces that lie on the host are written from there.
    """

    rank: int
    staging: dict[str, torch.Tensor] | None
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    mine: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)  # or another one might have its id
    _bytes: dict[tuple[str, ...], list[int]] = field(default_factory=dict)  # that each replica writes

    @property
    def file(self) -> str:
        """The name of this rank's file."""
        return f"rank-{self.rank:05d}.safetensors"

    def take(self, tensor: torch.Tensor, name: str) -> str:
        """Save a tensor under a name, or find the one under which it was saved before."""
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        self._check(tensor, name)
        pieces = []
        for offset, part in self._parts(tensor):
            key = f"{name}@{','.join(map(str, offset))}"
            shape = tuple(part.shape)
            value = stored(part.detach().resolve_conj().resolve_neg())
            self.mine[key] = self._on_host(key, value)
            pieces.append(SavedBlock(self.file, key, tuple(offset), shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors[name] = SavedTensor(dtype, tuple(tensor.shape), isinstance(tensor, PlacedTensor), tuple(pieces))
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        return name

    def keep(self, sums: Mapping[str, int]) -> None:
        """Note the checksums of what was written, by key."""
        for name, saved in self.tensors.items():
            pieces = tuple(replace(piece, sum=sums[piece.key]) for piece in saved.pieces)
            self.tensors[name] = replace(saved, pieces=pieces)

    def _on_host(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if self.staging is None:
            return value.cpu().contiguous()
        kept = self.staging.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda", device="cpu")
            self.staging[key] = kept
        if value.device.type != "cpu" or not value.is_contiguous():
            return kept.copy_(value)
        bytes_of(kept)[:] = bytes_of(value)  # torch would split each among threads, which wait for busy cores
        return kept

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        real = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
        if isinstance(tensor, ViewOf) or (isinstance(tensor, DTensor) and not isinstance(tensor, PlacedTensor)):
            raise CheckpointError(
                f"'{name}' is a view of a parameter, or a DTensor of another mesh than the model's: a checkpoint takes "
                f"its value, `.full_tensor()`."
            )
        if tensor.layout is not torch.strided or real not in DTYPES:
            raise CheckpointError(
                f"'{name}' is {tensor.dtype}, {tensor.layout}: safetensors has no form for it. Convert it, or leave "
                f"it out."
            )
        if tensor.device.type == "meta":
            raise CheckpointError(f"'{name}' is on the meta device: it has no values to save.")
        if name in self.tensors:
            raise CheckpointError(f"two tensors would be saved as '{name}'.")

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The blocks of a tensor that this rank writes."""
        if not isinstance(tensor, PlacedTensor):
            if self.rank == 0:
                yield (0,) * tensor.ndim, tensor
        elif self._is_turn(tensor.place, tensor.numel() * tensor.element_size()):
            for offset, part in blocks(tensor).items():
                yield tuple(offset), part

    def _is_turn(self, place: Place, bytes_: int) -> bool:
        """Whether it is this rank, of those that hold the same part, that writes it: the one with the least so far."""
        mesh, coord = place.world.mesh, place.world.coord
        split = (*place.layout.axes, *((PIPELINE,) if place.owner is not None else ()))
        axes = tuple(axis for axis in mesh.names if axis not in split)
        load = self._bytes.setdefault(axes, [0] * math.prod(mesh[axis] for axis in axes))
        turn = load.index(min(load))
        load[turn] += bytes_
        mine = 0
        for axis in axes:
            mine = mine * mesh[axis] + coord[axis]
        return turn == mine


def targets(tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The blocks of this rank's memory that hold a tensor, by their offsets in the whole."""
    held: Any = tensor.detach()
    if not isinstance(held, PlacedTensor):
        yield (0,) * held.ndim, held
        return
    local_of(held)[:0].zero_() if local_of(held).ndim else None  # every rank counts it as a write
    for offset, part in blocks(held).items():
        yield tuple(offset), part
