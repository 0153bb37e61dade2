"""A mixture of experts, and how people spread it over ranks by hand: rows go to their expert by all-to-all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare.models import WIDTH, Attention, Step, batch_of, model_of, plain

CHOSEN, INSIDE = 2, 256  # experts of a token, and the width inside of one


class Mixture(nn.Module):
    """A router, and experts in two stacked matrices. Rows are sorted by expert, as libraries do it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, INSIDE) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, INSIDE, WIDTH) / INSIDE**0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64).index_add_(0, expert, torch.ones_like(expert))
        y = self.computed(x[order // CHOSEN], counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOSEN, y).view_as(x_BTD)

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The results of rows that are sorted by expert; how many each has."""
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)


class Spread(Mixture):
    """The same, of which this rank has some experts."""

    def __init__(self, whole: Mixture) -> None:
        nn.Module.__init__(self)
        self.experts, self.router = whole.experts, whole.router
        self.up, self.down = (nn.Parameter(_own(matrices)) for matrices in (whole.up, whole.down))

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        size = dist.get_world_size()
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        sent, received = counts.view(size, -1).sum(1).tolist(), came.view(size, -1).sum(1).tolist()
        there = _Rows.apply(rows, sent, received)
        expert = torch.arange(len(self.up)).repeat(size).repeat_interleave(came)
        order = expert.argsort(stable=True)
        parts = there[order].split(came.view(size, -1).sum(0).tolist())
        y = torch.cat([F.silu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])
        return _Rows.apply(torch.empty_like(y).index_copy(0, order, y), received, sent)  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Rows.apply(grad, ctx.received, ctx.sent), None, None


def _own(matrices: Tensor) -> Tensor:
    return matrices.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


class Block(nn.Module):
    def __init__(self, context: int, experts: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(WIDTH), Attention(context)
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), Mixture(experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def spread(name: str, device: str) -> Step:
    """DistributedDataParallel for all but the experts, whose gradients are sums already: of means of each rank."""
    from torch.nn.parallel import DistributedDataParallel

    size = dist.get_world_size()
    x, y = (part.chunk(size)[dist.get_rank()] for part in batch_of(name, device))
    model: Any = model_of(name).to(device)
    for block in model.blocks:
        block.mlp = Spread(block.mlp)
    own = [name for name, _ in model.named_parameters() if name.endswith(("mlp.up", "mlp.down"))]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    for path in own:
        model.get_parameter(path).register_hook(lambda grad: grad / size)
    return plain(DistributedDataParallel(model, gradient_as_bucket_view=True), x, y)
