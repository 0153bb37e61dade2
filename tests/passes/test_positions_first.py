"""Models whose batch is [positions, samples]: their rows are flattened so that samples lie inside of positions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import Once

X = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(1))
CORES = {
    "rnn": lambda: nn.RNN(8, 8),
    "gru": lambda: nn.GRU(8, 8),
    "lstm": lambda: nn.LSTM(8, 8),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
}
WAYS: dict[str, dict[str, Any]] = {
    "dp=2,tp=2": {"microbatches": 2, "sequence_parallel": True},
    "pp=2,tp=2": {"microbatches": 4, "sequence_parallel": True},
    "dp=2,cp=2": {"microbatches": 2},
    "fsdp=2,cp=2,tp=2": {"microbatches": 2, "zero": 3, "sequence_parallel": True},
    "dp=2,ulysses=2": {"microbatches": 2},
}


class Language(nn.Module):
    """As in PyTorch's word_language_model: the logits of all positions of all samples are one list of rows."""

    def __init__(self, core: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.core, self.out = nn.Embedding(32, 8), CORES[core](), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        found = self.core(self.tokens(x))
        return self.out(found[0] if isinstance(found, tuple) else found).view(-1, 32)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y.reshape(-1))


@functools.cache
def once(core: str) -> Once:
    return Once.of(Language(core), loss, (X, Y), batch_dims={"x": 1, "y": 1})


@pytest.mark.parametrize("mesh", WAYS)
@pytest.mark.parametrize("core", CORES)
def test_they_are_those_of_one_device(core: str, mesh: str) -> None:
    once(core).right(mesh, batch_dims={"x": 1, "y": 1}, **WAYS[mesh])


def test_positions_are_gathered_and_no_samples() -> None:
    """Over tp alone, which has a part of the positions of each sample."""
    made = once("gru").compiled("dp=2,tp=2", batch_dims={"x": 1, "y": 1}, sequence_parallel=True)
    over = {str(node.args[1]) for node in made.program.calls() if "all_gather" in str(node.target)}
    assert over == {"tp"}
