"""Shard metadata for torch.distributed.checkpoint: the blocks of the global tensor that this rank holds.

torch's own DTensor has one block a rank. A fused weight `[3:tp,-]` has three: a third of each third.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.ir.layout import Layout
from autopar.parallel.tensors.placed import PlacedTensor
from autopar.torch_compat import local_of


@dataclass(frozen=True, slots=True)
class PartRun:
    """Neighbours in the whole that are neighbours in the part."""

    whole: int
    part: int
    size: int


def chunks(tensor: PlacedTensor) -> dict[torch.Size, tuple[ChunkStorageMetadata, torch.Tensor]]:
    """By offset in the whole: each block, and the piece of this rank's memory that holds it."""
    found: dict[torch.Size, tuple[ChunkStorageMetadata, torch.Tensor]] = {}
    if not tensor.place.is_here:
        return found
    for runs in itertools.product(*(_runs(tensor, dim) for dim in range(tensor.ndim))):
        offsets, sizes = torch.Size(run.whole for run in runs), torch.Size(run.size for run in runs)
        piece = local_of(tensor)
        for dim, run in enumerate(runs):
            piece = piece.narrow(dim, run.part, run.size)
        found[offsets] = ChunkStorageMetadata(offsets, sizes), piece.detach()
    return found


def write_items(name: str, tensor: PlacedTensor) -> list[WriteItem]:
    """The blocks as a checkpoint writes them."""
    properties, size = TensorProperties.create_from_tensor(local_of(tensor)), tensor.size()
    return [
        WriteItem(
            MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)
        )
        for offset, (chunk, _) in chunks(tensor).items()
    ]


def _runs(tensor: PlacedTensor, dim: int) -> list[PartRun]:
    """The blocks along one dim, from what a tensor of all its positions would leave here."""
    place = tensor.place
    along = place.world.place(Layout((place.layout.dims[dim],)), place.owner)
    here = along.part(torch.arange(tensor.shape[dim])).tolist()
    starts = [i for i, at in enumerate(here) if i == 0 or at != here[i - 1] + 1]
    return [PartRun(here[a], a, b - a) for a, b in itertools.pairwise([*starts, len(here)])]
