"""The sides that save memory: FSDP2, DDP with ZeroRedundancyOptimizer, checkpointed layers, as people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.compare.models import Step, batch_of, model_of, plain


def fully_sharded(name: str, device: str) -> Step:
    """FSDP2: each layer, and the rest as one."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model: Any = model_of(name).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, *_part(name, device))


def zero_redundancy(name: str, device: str) -> Step:
    """DDP, and optimizer states divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model: Any = DistributedDataParallel(model_of(name).to(device), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    return plain(model, *_part(name, device), optimizer=optimizer)


class Checkpointed(nn.Module):
    """A layer of which only the input is kept."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


def checkpointed(name: str, device: str) -> Step:
    """Every layer is computed again in the backward pass; with several ranks under DDP."""
    from torch.nn.parallel import DistributedDataParallel

    model: Any = model_of(name).to(device)
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain(model, *_part(name, device))


def _part(name: str, device: str) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch."""
    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch_of(name, device))
    return x, y
