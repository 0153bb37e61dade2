"""An LSTM whose sequence two local Gloo processes share: they take turns."""

from __future__ import annotations

import pytest
import torch
from processes import ranks_of
from torch import Tensor, nn

from autopar.job import Job
from autopar.verification.verify_ranks import verify_on_ranks

pytestmark = pytest.mark.gloo


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.lstm, self.down = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.lstm(self.up(x))[0]).square().mean()


def _verify(rank: int, compile: str) -> str:
    torch.manual_seed(0)
    report = verify_on_ranks(Job(Small(), batch=torch.randn(2, 12, 4), compile=compile), "cp=2", steps=2, seed=0)
    return "" if report is None else f"{report.ok and report.max_error < 1e-10}\n{report}"


@pytest.mark.parametrize("compiler", ("executor", pytest.param("inductor", marks=pytest.mark.slow)))
def test_steps_are_those_of_the_plain_module(compiler: str) -> None:
    with ranks_of(2) as ranks:
        found, _ = ranks.run(_verify, compiler, timeout=300)
    assert found.startswith("True"), found
