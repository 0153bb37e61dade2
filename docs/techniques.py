"""Models of the page techniques.md, for `autopar inspect docs/techniques.py:stack --mesh ...`, of convenient sizes.

Names carry shapes: B rows, D width, F width inside of an expert, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

WIDTH, LAYERS, ROWS = 256, 8, 64
EXPERTS, INSIDE = 8, 512


class Layer(nn.Module):
    """Two products without biases: 8 D^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(F.relu(self.up(x_BD)))


class Experts(nn.Module):
    """Each row goes to the expert that a router likes best; every expert has two products."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / INSIDE**0.5)

    def forward(self, x_BD: Tensor) -> Tensor:
        weight_B, expert_B = self.router(x_BD).softmax(-1).max(-1)
        order_B = expert_B.argsort()
        ends_E = F.one_hot(expert_B, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        hidden_BF = F.relu(F.grouped_mm(x_BD[order_B], self.up, offs=ends_E))
        sorted_BD = F.grouped_mm(hidden_BF, self.down, offs=ends_E)
        return x_BD + sorted_BD[order_B.argsort()] * weight_B[:, None]


def loss_fn(model: nn.Module, x_BD: Tensor, y_BD: Tensor) -> Tensor:
    return F.mse_loss(model(x_BD), y_BD)


def stack() -> autopar.Job:
    """Eight equal layers: P = 8 * 8 * 256^2 = 4,194,304 parameters."""
    return _stack(WIDTH, ROWS)


def wide() -> autopar.Job:
    """The same with layers so large that transfers take little time; without memory for weights and data."""
    with torch.device("meta"):
        return _stack(32768, 16384)


def _stack(width: int, rows: int) -> autopar.Job:
    model = nn.Sequential(*(Layer(width) for _ in range(LAYERS)))
    return autopar.Job(model, loss_fn, (torch.randn(rows, width), torch.randn(rows, width)))


def experts() -> autopar.Job:
    """One layer of experts."""
    return autopar.Job(Experts(), loss_fn, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)))
