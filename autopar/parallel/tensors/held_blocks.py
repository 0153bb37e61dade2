"""The blocks of a parameter that lie in this rank's memory, and as `torch.distributed.checkpoint` writes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.layout import Layout
from autopar.parallel.tensors.placed import PlacedTensor
from autopar.torch_compat import local_of


@dataclass(frozen=True, slots=True)
class PartRun:
    """Neighbours in the whole that are neighbours in the part."""

    whole: int
    part: int
    size: int


def blocks(tensor: PlacedTensor) -> dict[torch.Size, torch.Tensor]:
    """By offset in the whole: the piece of this rank's memory that holds a block."""
    found: dict[torch.Size, torch.Tensor] = {}
    if not tensor.place.is_here:
        return found
    for runs in itertools.product(*(_runs(tensor, dim) for dim in range(tensor.ndim))):
        piece = local_of(tensor)
        for dim, run in enumerate(runs):
            piece = piece.narrow(dim, run.part, run.size)
        found[torch.Size(run.whole for run in runs)] = piece.detach()
    return found


def chunks(tensor: PlacedTensor) -> list[Any]:
    """The blocks as ChunkStorageMetadata, whose imports take 0.2 s of a start that saves nothing in this way."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offset, piece.shape) for offset, piece in blocks(tensor).items()]


def write_items(name: str, tensor: PlacedTensor) -> list[Any]:
    """The blocks as WriteItems."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties, size = TensorProperties.create_from_tensor(local_of(tensor)), tensor.size()
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for chunk in chunks(tensor)
    ]


def _runs(tensor: PlacedTensor, dim: int) -> list[PartRun]:
    """The blocks along one dim, from what a tensor of all its positions would leave here."""
    place = tensor.place
    along = place.world.place(Layout((place.layout.dims[dim],)), place.owner)
    here = along.part(torch.arange(tensor.shape[dim], device="cpu")).tolist()
    starts = [i for i, at in enumerate(here) if i == 0 or at != here[i - 1] + 1]
    return [PartRun(here[a], a, b - a) for a, b in itertools.pairwise([*starts, len(here)])]
