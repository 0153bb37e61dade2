"""The peer of pipelines: torch.distributed.pipelining with stages split by hand, as its documentation does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.compare.models import MICROBATCHES, Step, batch_of, model_of, optimizer_of


class First(nn.Module):
    """Embeddings and the first blocks, of the GPT or the Llama."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        self.tokens, self.blocks = model.tokens, model.blocks[:blocks]
        self.positions = getattr(model, "positions", None)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other blocks, and the head."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[blocks:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def pipelined(name: str, device: str, blocks: int) -> Step:
    """1F1B on two stages, the first with so many blocks; other ranks are data parallel by DistributedDataParallel.

    The GPT's head is tied to its embedding: both stages have it, and its gradients are added up, as Megatron does.
    """
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    stage, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model: Any = model_of(name)
    tied = model.head.weight is model.tokens.weight
    part: Any = (First(model, blocks) if stage == 0 else Last(model, blocks)).to(device)
    both = part.tokens.weight if stage == 0 else part.head.weight
    del model
    if mesh["dp"].size() > 1:
        part = nn.parallel.DistributedDataParallel(
            part, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
        )
    x, y = (whole.chunk(mesh["dp"].size())[place] for whole in batch_of(name, device))
    run = PipelineStage(part, stage, 2, torch.device(device), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(run, MICROBATCHES, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    optimizer = optimizer_of(part)

    def step() -> Tensor:
        losses: list[Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses, return_outputs=False)
        if tied:
            dist.all_reduce(both.grad, group=mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad()
        # only the last stage has it
        return 2 * torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return step
