"""Functions of torch.jit.script in a forward pass: x_transformers' `softclamp`, many older activations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from models import BATCH, square_loss
from torch import Tensor, nn
from verified import verified

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # older models are written so

    @torch.jit.script
    def softclamp(x: Tensor, value: float) -> Tensor:
        return (x / value).tanh() * value

    @torch.jit.script
    def repeats(x: Tensor, value: float) -> Tensor:
        """torch computes what is the same once."""
        return (x / value).tanh() * value + (x / value).tanh()


class Activated(nn.Module):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        function: Callable[..., Tensor] = globals()[self.function]
        for layer in self.layers:
            x = function(layer(x), 2.5)
        return x


@pytest.mark.parametrize("function", ["softclamp", "repeats"])
def test_its_ops_are_seen_in_every_run(function: str) -> None:
    """No function mode sees what C++ calls, which looked like numbers that are others in each run."""
    batch = torch.randn(BATCH, 8), torch.randn(BATCH, 8)
    verified(Activated(function), ["dp=2,tp=2", "dp=3"], square_loss, batch)
