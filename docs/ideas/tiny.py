"""Models of these pages, for `autopar inspect docs/ideas/tiny.py:mlp --mesh ...`, as small as an idea allows.

Names carry shapes: B rows, T positions, D width, F width inside, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

ROWS, LENGTH, WIDTH, HEADS = 12, 16, 8, 2


def square_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BD)))


class Attention(nn.Module):
    """Attention with one weight for queries, keys and values; `sees` makes a mask of the positions."""

    def __init__(self, sees: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.sees = sees

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1))
        if self.sees is None:
            out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out_BHTK = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees(torch.arange(x_BTD.shape[1])))
        return self.out(out_BHTK.transpose(1, 2).flatten(2))


class Decay(nn.Module):
    """h[t] = a[t] h[t-1] + u[t], in a loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        a_BTD, u_BTD = self.rate(x_BTD).sigmoid(), self.up(x_BTD)
        h_BD, states = torch.zeros_like(u_BTD[:, 0]), []
        for t in range(x_BTD.shape[1]):
            h_BD = a_BTD[:, t] * h_BD + u_BTD[:, t]
            states.append(h_BD)
        return torch.stack(states, 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.mlp(self.norm(x_BD))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.table(ids_BT))


def _rows(model: nn.Module, *shape: int) -> autopar.Job:
    return autopar.Job(model, square_loss, (torch.randn(shape), torch.randn(shape)))


def mlp() -> autopar.Job:
    return _rows(Mlp(), ROWS, WIDTH)


def sequence() -> autopar.Job:
    return _rows(Mlp(), 4, LENGTH, WIDTH)


def residual() -> autopar.Job:
    return _rows(nn.Sequential(Residual(), Residual()), ROWS, WIDTH)


def qkv() -> autopar.Job:
    return _rows(Attention(), 4, LENGTH, WIDTH)


def window() -> autopar.Job:
    return _rows(Attention(lambda at: (at[:, None] >= at) & (at[:, None] - at < 4)), 4, LENGTH, WIDTH)


def decay() -> autopar.Job:
    return _rows(Decay(), 4, LENGTH, WIDTH)


def valid() -> autopar.Job:
    """The mean over the rows that count: how many do is known to the batch alone."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, valid_B: Tensor) -> Tensor:
        weight_B = valid_B.float()
        return ((model(x) - y).square().sum(-1) * weight_B).sum() / weight_B.sum()

    return autopar.Job(Mlp(), loss_fn, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.rand(ROWS) < 0.7))


def lookup() -> autopar.Job:
    def loss_fn(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    return autopar.Job(Lookup(), loss_fn, (torch.randint(24, (4, LENGTH)), torch.randint(24, (4, LENGTH))))
