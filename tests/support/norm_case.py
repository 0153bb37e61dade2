"""A small net with a norm over samples, and the loop of plain PyTorch that trains it with micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

F64 = torch.float64
# Samples of unlike sizes, so that each group has statistics of its own.
SCALE = torch.linspace(0.5, 3, 12, dtype=F64)
X = torch.randn(12, 6, dtype=F64, generator=torch.Generator().manual_seed(0)) * SCALE[:, None]
S = torch.randn(12, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1)) * SCALE[:, None, None]
Y = torch.randn(12, 3, dtype=F64, generator=torch.Generator().manual_seed(2))


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


class Net(nn.Module):
    """a, norm, o; `run` says how."""

    def __init__(self, norm: Callable[[], nn.Module], run: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.o = nn.Linear(6, 5), norm(), nn.Linear(5, 5), nn.Linear(5, 3)
        self.run = run
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("variance", torch.ones(5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x) if self.run else self.o(self.b(self.a(x)).tanh())


def norm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm1d(5, **options)


def loop(model: nn.Module, x: Tensor, ranks: int, parts: int, lr: float = 0.1) -> dict[str, Tensor]:
    """Two steps of plain PyTorch: data ranks each with their micro-batches, one after another, from the same buffers,
    of which they take the mean."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    size = len(x) // (ranks * parts)
    for step in range(2):
        optimizer.zero_grad()
        start, ends, total = copy.deepcopy(dict(model.named_buffers())), [], torch.zeros((), dtype=F64)
        for rank in range(ranks):
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            for part in range(parts):
                rows = slice((rank * parts + part) * size, (rank * parts + part + 1) * size)
                loss = mse(model, x[rows], Y[rows]) / (ranks * parts)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            ends.append(copy.deepcopy(dict(model.named_buffers())))
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.stack([end[name].double() for end in ends]).mean(0))
        optimizer.step()
        found[f"loss {step}"] = total
    return {**found, **model.state_dict()}
