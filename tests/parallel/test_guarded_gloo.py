"""Branches on data and on random numbers, on two ranks: the same program on both, and nothing is changed before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.job import Job
from autopar.verification.verify_ranks import verify_on_ranks

pytestmark = pytest.mark.gloo
MESHES: list[tuple[str, dict[str, Any]]] = [("dp=2", {}), ("tp=2", {}), ("pp=2", {"microbatches": 2})]


class Checked(nn.Module):
    """Overflow is cut, labels are checked, and a buffer is set at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("initted", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if (y > 9).any():
            raise ValueError("labels go to 9")
        assert (y >= 0).all(), "labels begin at 0"
        if not self.initted:
            self.scale.copy_(x.abs().mean() + 1)
            self.initted.fill_(True)
        h = self.up(x) / self.scale
        if not torch.isfinite(h).all():
            h = torch.nan_to_num(h, posinf=2.0)
        return (self.down(h).sum(-1) - y).square().mean()


class Dropped(nn.Module):
    """Layers that are left out by chance, one with other calls in its place, and a crop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            if torch.rand([]) < 0.4:
                continue
            x = x + F.dropout(layer(x), 0.1)
        x = x.flip(1) if torch.rand(()) < 0.5 else F.dropout(self.layers[3](x), 0.2)
        return (x.sum(-1) - y).square().mean()


class Mixed(nn.Module):
    """Floats that are drawn on the host, and floats of random tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = random.random()
        x = torch.tanh(self.up(share * x + (1 - share) * x.flip(1))) * float(torch.empty(1).uniform_(0.5, 2))
        return ((self.down(x) * np.random.beta(0.5, 0.5)).sum(-1) - y).square().mean()


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def batch(largest: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    x = torch.randn(6, 8, dtype=torch.float64)
    x[0, 0] = largest
    return x, torch.arange(6).double()


def _checked(rank: int, mesh: str, options: dict[str, Any]) -> list[Any]:
    """Every step beside the plain module: overflow in some, labels out of range in others."""
    parallel, plain = autopar.parallelize(made(Checked), mesh, **options), made(Checked)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (parallel, plain))
    said: list[Any] = []
    for largest, low, high in ((1.0, 0, 0), (1.0, 0, 7), (1.0, -1, 0), (1.0, 0, 0), (float("inf"), 0, 0)):
        x, y = batch(largest)
        y[0], y[-1] = low, y[-1] + high
        raised = []
        for optimizer, step in ((ours, parallel.forward_backward), (theirs, _step_of(plain))):
            optimizer.zero_grad()
            try:
                raised.append(float(step(x, y)))
                optimizer.step()
            except (ValueError, AssertionError) as error:
                raised.append(f"{type(error).__name__}: {error}")
        if isinstance(raised[0], float):
            torch.testing.assert_close(raised[0], raised[1], rtol=1e-12, atol=0, equal_nan=True)
        else:
            assert raised[0] == raised[1]
            said.append(raised[0])
        state = parallel.full_state_dict()
        for name, value in plain.state_dict().items() if rank == 0 else ():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, equal_nan=True)
    return [*said, len(parallel.programs)]


def _step_of(plain: nn.Module) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(x, y)
        loss.backward()
        return loss

    return step


def _drawing(rank: int, kind: type[nn.Module], mesh: str, options: dict[str, Any]) -> str:
    job = Job(made(kind), batch=batch(), **options)
    report = verify_on_ranks(job, mesh, steps=5, seed=0)
    return "" if report is None or report.ok else str(report)


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_checks_and_overflow(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    first, second = two.run(_checked, mesh, options, timeout=120)
    assert first == second == ["ValueError: labels go to 9", "AssertionError: labels begin at 0", 3]


class Asking(nn.Module):
    """What its batch's tensors carry, and how they lie, decides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x) * getattr(x, "weight", 1.0) * (2 if x.is_contiguous() else 1)
        if isinstance(y, nn.Parameter):
            h = h * x.mask
        return (self.down(h).sum(-1) - y).square().mean()


def _asking(rank: int, mesh: str, options: dict[str, Any]) -> int:
    parallel, plain = autopar.parallelize(made(Asking), mesh, **options), made(Asking)
    for k in range(6):
        x, y = batch()
        x = x if k % 3 else x.t().contiguous().t()
        x.weight = 1 + k / 3
        if k % 2:
            x.mask, y = torch.full((6, 12), 1.5 + k, dtype=torch.float64), nn.Parameter(y, requires_grad=False)
        for each in (parallel, plain):
            each.zero_grad()
        torch.testing.assert_close(parallel.forward_backward(x, y), _step_of(plain)(x, y).detach(), rtol=1e-12, atol=0)
        grads = parallel.full_gradients()
        for name, parameter in plain.named_parameters() if rank == 0 else ():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    return len(parallel.programs)


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_what_a_batch_carries(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    """Red before: no rank saw it."""
    first, second = two.run(_asking, mesh, options, timeout=200)
    assert first == second


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_layers_left_out(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    assert two.run(_drawing, Dropped, mesh, options, timeout=120) == ["", ""]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_floats_that_a_step_draws(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    assert two.run(_drawing, Mixed, mesh, options, timeout=120) == ["", ""]
