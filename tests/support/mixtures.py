"""Small mixtures of experts whose routing a test decides: `skew` sends rows to some experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, LENGTH, BATCH = 12, 20, 6, 8  # H, I, S, B; N = B S rows, K experts of each, E in all


@dataclass(frozen=True)
class Kind:
    """experts, chosen: how many there are, and how many a row takes. skew: added to the scores of the first experts;
    -1: the router is zero, so that all scores are alike. way: how rows meet experts. bias: experts add one. shared: a
    dense expert takes every row. normed: experts normalise what is hidden, and gate half of it. aux: a loss that
    balances. z: one that keeps scores small (arXiv 2202.08906). jitter: what the router sees is multiplied by random
    numbers, as Switch Transformers does."""

    experts: int = 8
    chosen: int = 2
    skew: float = 0.0
    way: str = "grouped"
    bias: bool = False
    shared: bool = False
    normed: bool = False
    aux: bool = False
    z: bool = False
    jitter: bool = False
    blocks: int = 2
    width: int = WIDTH
    hidden: int = HIDDEN


class Mixture(nn.Module):
    """The experts of one block."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        n, width = kind.experts, kind.width
        self.router = nn.Linear(width, n, bias=False)
        self.skew = nn.Buffer(torch.cat([torch.ones(max(1, n // 4)), torch.zeros(n - max(1, n // 4))]) * kind.skew)
        self.up = nn.Parameter(torch.randn(n, width, kind.hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(n, kind.hidden, width) * 0.3)
        if kind.bias:
            self.up_bias = nn.Parameter(torch.randn(n, kind.hidden) * 0.3)
            self.down_bias = nn.Parameter(torch.randn(n, width) * 0.3)
        if kind.shared:
            self.shared = nn.Linear(width, width)
        if kind.skew < 0:
            nn.init.zeros_(self.router.weight)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        x = x_BSH.reshape(-1, self.kind.width)
        seen = x * torch.empty_like(x).uniform_(0.9, 1.1) if self.kind.jitter else x
        logits = self.router(seen) + self.skew
        scores = logits.softmax(-1)
        weights_NK, experts_NK = torch.topk(scores, self.kind.chosen)
        y = getattr(self, f"_{self.kind.way}")(x, weights_NK, experts_NK)
        if self.kind.shared:
            y = y + self.shared(x)
        share_E = F.one_hot(experts_NK, self.kind.experts).to(x.dtype).sum(1).mean(0)
        balance = (share_E * scores.mean(0)).sum() * self.kind.experts if self.kind.aux else torch.zeros(())
        if self.kind.z:
            balance = balance + torch.logsumexp(logits, -1).square().mean()
        return y.view_as(x_BSH), balance

    def _grouped(self, x: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        """Sorted rows and grouped products, as libraries write it."""
        k = self.kind.chosen
        experts = experts_NK.reshape(-1)
        order = torch.argsort(experts, stable=True)
        of_row = experts[order]
        ends = torch.histc(of_row.float(), self.kind.experts, 0, self.kind.experts - 1).cumsum(0, dtype=torch.int32)
        hidden = products(x[order // k], self.up, ends)
        if self.kind.normed:
            left, right = F.layer_norm(hidden, (self.kind.hidden,)).chunk(2, -1)
            hidden = torch.cat([left * right, right], -1)
        hidden = F.silu(hidden + self.up_bias[of_row] if self.kind.bias else hidden)
        y = products(hidden, self.down, ends)
        y = (y + self.down_bias[of_row] if self.kind.bias else y) * weights_NK.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // k, y)

    def _loop(self, x: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        """A loop over experts, each with the rows that chose it."""
        out = torch.zeros_like(x)
        for expert in range(self.kind.experts):
            rows, place = torch.where(experts_NK == expert)
            y = F.silu(x[rows] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, rows, y * weights_NK[rows, place, None])
        return out

    def _mask(self, x: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        """Every expert with every row, of which most weigh nothing."""
        out = torch.zeros_like(x)
        for expert in range(self.kind.experts):
            weight = torch.where(experts_NK == expert, weights_NK, 0).sum(-1, keepdim=True)
            out = out + F.silu(x @ self.up[expert]) @ self.down[expert] * weight
        return out


def products(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Grouped products; torch has none in float64, in which the plain module is compared."""
    try:
        return F.grouped_mm(x, w, offs=ends)
    except RuntimeError:
        bounds = [0, *ends.tolist()]
        pairs = zip(bounds, bounds[1:], w, strict=False)
        return torch.cat([x[start:end] @ matrix for start, end, matrix in pairs])


class Mixtures(nn.Module):
    """Blocks of a dense layer and a mixture, between a table and a head."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(16, kind.width)
        self.dense = nn.ModuleList(nn.Linear(kind.width, kind.width) for _ in range(kind.blocks))
        self.mixed = nn.ModuleList(Mixture(kind) for _ in range(kind.blocks))
        self.head = nn.Linear(kind.width, 16)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x, balance = self.tokens(tokens_BS), torch.zeros(())
        for dense, mixed in zip(self.dense, self.mixed, strict=True):
            x = x + torch.tanh(dense(x))
            y, share = mixed(x)
            x, balance = x + y, balance + share
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels_BS.flatten())
        return loss + 0.01 * balance if self.kind.aux or self.kind.z else loss


def mixture_case(kind: Kind) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and an asymmetric batch: some tokens are frequent, and rows differ from rank to rank."""
    torch.manual_seed(3)
    tokens = (torch.rand(BATCH, LENGTH) ** 2 * torch.linspace(4, 16, BATCH).view(-1, 1)).long()
    return Mixtures(kind), (tokens, (tokens * 7 + torch.arange(LENGTH)) % 16)
