"""Python's and numpy's generators: numbers that are drawn and decide nothing, and numbers that do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
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


def noise(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.as_tensor(np.random.randn(8)).to(h)


@pytest.mark.parametrize(
    ("body", "p"),
    [(below, 0.1), (below, 1e-6), (below, 1 - 1e-6), (above, 0.9), (above, 1e-6), (above, 1 - 1e-6), (interval, 0),
     (one_of_many, 0), (order, 0), (scale, 0), (noise, 0)],
)  # fmt: skip
def test_numbers_that_decide_are_refused_with_their_line(body: Body, p: float) -> None:
    for seed in range(4):  # whatever the first run draws
        random.seed(seed)
        np.random.seed(seed)
        with pytest.raises(CaptureError, match=r"the model draws numbers from .* while it runs, at") as caught:
            autopar.compile(made(body, p), "dp=2", loss_fn=loss_fn, batch=(rows(),))
        lines = range(body.__code__.co_firstlineno, body.__code__.co_firstlineno + 4)
        assert any(f"{__file__}:{line}\n" in str(caught.value) for line in lines)
