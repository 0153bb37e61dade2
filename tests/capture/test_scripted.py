"""Functions of torch.jit.script in a forward pass: x_transformers' `softclamp`, many older activations."""

from __future__ import annotations

import warnings

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


class Clamped(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = softclamp(layer(x), 2.5)
        return x


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_it_runs_op_by_op_each_time(layers: int) -> None:
    """No function mode sees what C++ calls, which looked like numbers that are others in each run; and torch would run
    other ops from the second call on."""
    batch = torch.randn(BATCH, 8), torch.randn(BATCH, 8)
    found = verified(Clamped(layers), ["dp=2,tp=2", "dp=3"], square_loss, batch)
    for _, compiled in found:
        targets = [str(node.target) for node in compiled.program.calls()]
        assert sum("tanh_backward" in target for target in targets) == layers
