"""What torch.distributed.checkpoint asks of a tensor: the blocks of the whole of which this rank's part is made.

torch's own DTensor has one block a rank. A fused weight `[3:tp,-]` has three: a third of each third.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.torch_compat import StridedShard, local_of, spec_of


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in the whole that are neighbours in the part."""

    whole: int
    part: int
    size: int


def chunks(tensor: DTensor) -> dict[torch.Size, tuple[ChunkStorageMetadata, torch.Tensor]]:
    """By offset in the whole: each block, and the piece of this rank's memory that holds it."""
    found = {}
    for runs in itertools.product(*(_runs(spec_of(tensor), dim) for dim in range(tensor.ndim))):
        offsets, sizes = torch.Size(run.whole for run in runs), torch.Size(run.size for run in runs)
        piece = local_of(tensor)
        for dim, run in enumerate(runs):
            piece = piece.narrow(dim, run.part, run.size)
        found[offsets] = ChunkStorageMetadata(offsets, sizes), piece.detach()
    return found


def write_items(name: str, tensor: DTensor) -> list[WriteItem]:
    """The blocks as a checkpoint writes them."""
    properties, size = TensorProperties.create_from_tensor(local_of(tensor)), tensor.size()
    return [
        WriteItem(
            MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)
        )
        for offset, (chunk, _) in chunks(tensor).items()
    ]


def _runs(spec: Any, dim: int) -> list[Run]:
    """The blocks along one dim, from what a tensor of all its positions would leave here."""
    placed = [_along(placement, dim) for placement in spec.placements]
    positions = torch.arange(spec.shape[dim], device=spec.mesh.device_type)
    here = local_of(distribute_tensor(positions, spec.mesh, placed, src_data_rank=None)).tolist()
    starts = [i for i, at in enumerate(here) if i == 0 or at != here[i - 1] + 1]
    return [Run(here[a], a, b - a) for a, b in itertools.pairwise([*starts, len(here)])]


def _along(placement: Any, dim: int) -> Any:
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    strided = isinstance(placement, StridedShard)
    return StridedShard(0, split_factor=placement.split_factor) if strided else Shard(0)
