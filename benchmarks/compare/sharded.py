"""The sides that save memory: FSDP2, DDP with ZeroRedundancyOptimizer, checkpointed layers, what waits in the host's
memory, as people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.compare.models import Step, batch_of, model_of, plain


def fully_sharded(name: str, device: str, on_host: bool = False) -> Step:
    """FSDP2: each layer, and the rest as one. on_host: with CPUOffloadPolicy, parameters, gradients and the optimizer's
    step in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda") if on_host else OffloadPolicy()
    model: Any = model_of(name) if on_host else model_of(name).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return plain(model, *_part(name, device))


def saved_on_host(name: str, device: str) -> Step:
    """All that autograd saves waits in the host's memory: torch.autograd.graph.save_on_cpu."""
    model = model_of(name).to(device)
    return plain(model, *batch_of(name, device), lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


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
