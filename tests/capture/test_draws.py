"""Python's and numpy's generators: numbers that are drawn and decide nothing, and numbers that do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verified import verified

import autopar
from autopar.errors import CaptureError

Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body, p: float = 0.0) -> None:
        super().__init__()
        self.body, self.p = body, p
        self.linear, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x), x)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(body: Body, p: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(body, p)


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8)


def below(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """BART's layer drop."""
    return h if random.uniform(0, 1) < m.p else m.layer(h)


def above(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """wav2vec's."""
    return m.layer(h) if np.random.uniform(0, 1) > m.p else h


def unused(m: Any, h: Tensor, x: Tensor) -> Tensor:
    numbers = list(range(5))
    random.shuffle(numbers)
    np.random.randn(3), random.choice(numbers), random.gauss(0, 1), np.random.permutation(4)
    return m.layer(h)


@pytest.mark.parametrize("body", [below, above, unused])
def test_numbers_that_decide_nothing_are_taken(body: Body) -> None:
    verified(made(body), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))


def test_it_is_noted_and_the_generators_are_as_after_one_forward() -> None:
    for body, where in ((below, "Python's random module"), (above, "numpy.random")):
        random.seed(7)
        np.random.seed(7)
        made(body)(rows())
        wanted = random.getstate(), bytes(np.random.get_state()[1])
        random.seed(7)
        np.random.seed(7)
        notes = autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),)).notes
        assert [note for note in notes if f"draws numbers from {where} while it runs, and whatever" in note]
        assert (random.getstate(), bytes(np.random.get_state()[1])) == wanted


def interval(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if 0.2 < random.random() < 0.3 else m.layer(h)


def one_of_many(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if random.randrange(8) == 7 else m.layer(h)


def order(m: Any, h: Tensor, x: Tensor) -> Tensor:
    numbers = list(range(8))
    random.shuffle(numbers)
    return m.layer(h[..., numbers])


def scale(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * np.random.rand()


def computed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """In Python, on both sides of tensors, in place, and by which a branch goes."""
    k = math.sqrt(abs(random.gauss(0, 1)))
    h = torch.where(h > k, h - k, k - h) ** (k / 2) * 1
    h += max(0.5, k)
    return h.clamp(max=k) * 0.5 if k < 1 else torch.lerp(h, m.layer(x), random.random())


def noise(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.as_tensor(np.random.randn(8)).to(h)


def masked(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """As SpecAugment: rows of a copy are written where numpy says."""
    mask = torch.tensor(np.random.rand(*h.shape[:2]) < 0.3, device=h.device, dtype=torch.bool)
    h = m.layer(h) * 1
    h[mask] = m.layer.bias
    return h * torch.from_numpy(np.random.rand(8) < 0.7)


def with_a_coin(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * torch.tensor(np.random.rand(8) < 0.5)
    if torch.rand(()) < 0.5:
        h = h + F.dropout(m.layer(h), 0.2)
    return F.dropout(h, 0.1)


DECIDE = [(below, 0.1), (above, 0.9), (interval, 0), (scale, 0), (computed, 0), (one_of_many, 0), (order, 0),
          (noise, 0), (masked, 0), (with_a_coin, 0)]  # fmt: skip


@pytest.mark.parametrize(("body", "p"), DECIDE)
def test_numbers_that_decide_are_drawn_in_each_step(body: Body, p: float) -> None:
    report = autopar.verify(made(body, p), "dp=2,tp=2", loss_fn=loss_fn, batch=(rows(),), steps=4)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize(("body", "p"), [(below, 0.5), (noise, 0), (masked, 0)])
def test_a_seed_of_the_users_draws_what_the_plain_module_draws(body: Body, p: float) -> None:
    plain, parallel = made(body, p), autopar.parallelize(made(body, p), "dp=1", loss_fn=loss_fn)
    found: list[list[float]] = []
    for step in (lambda: loss_fn(plain, rows()), lambda: parallel.forward_backward(rows())):
        random.seed(7)
        np.random.seed(7)
        found.append([float(step()) for _ in range(6)])
    assert found[0] == pytest.approx(found[1], rel=1e-6) and len(set(found[1])) > 1
    assert len(parallel.programs) <= 2


def mixup(model: nn.Module, x: Tensor) -> Tensor:
    """Zhang et al. 2018, as its script draws: one weight of a step, and numpy's order of the rows."""
    share, other = np.random.beta(0.4, 0.4), x[torch.as_tensor(np.random.permutation(len(x)))]
    return (model(share * x + (1 - share) * other) - (share * x.sum() + (1 - share) * other.sum())).square().mean()


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2,tp=2", 1), ("pp=2,dp=2", 2)])
def test_a_loss_of_mixed_samples(mesh: str, microbatches: int) -> None:
    options: Any = {"microbatches": microbatches, "steps": 4}
    report = autopar.verify(made(above, 0), mesh, loss_fn=mixup, batch=(rows(),), **options)
    assert report.ok and report.max_error < 1e-10, report


def test_floats_are_inputs_of_one_program() -> None:
    plain, parallel = made(scale), autopar.parallelize(made(scale), "dp=1", loss_fn=loss_fn)
    found: list[list[float]] = []
    for step in (lambda: loss_fn(plain, rows()), lambda: parallel.forward_backward(rows())):
        np.random.seed(7)
        found.append([float(step().detach()) for _ in range(6)])
    assert found[0] == pytest.approx(found[1], rel=1e-6) and len(set(found[1])) == 6
    assert len(parallel.programs) == 1


def options(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.add(h, x, alpha=random.random())


def rate(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return F.dropout(h, random.random())


def filled(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.full((8,), random.random())


def computed_again(m: Any, h: Tensor, x: Tensor) -> Tensor:
    share = random.random()
    return checkpoint(lambda x: torch.tanh(m.layer(x)) * share, h, use_reentrant=False)


@pytest.mark.parametrize("body", [options, rate, filled, computed_again])
def test_floats_that_cannot_be_inputs_are_refused_with_their_line(body: Body) -> None:
    with pytest.raises(CaptureError, match="the model computes with a float that it draws while it runs") as caught:
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    lines = range(body.__code__.co_firstlineno, body.__code__.co_firstlineno + 3)
    assert any(f"{__file__}:{line}\n" in str(caught.value) for line in lines)
    assert "torch.tensor(random.random())" in str(caught.value)
