"""A weight that two stages use: its gradient comes home once a step, in whatever precision its parts are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

WORDS, WIDTH, ROWS = 40, 8, 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float(), ids)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_its_gradient_is_sent_once_a_step(precision: str | None, schedule: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (ROWS,))
    asked: dict[str, Any] = {"loss_fn": loss, "batch": ids, "microbatches": 4, "schedule": schedule}
    asked |= {"precision": precision} if precision else {}
    report = autopar.verify(Tied(), "pp=2", steps=1, **asked)
    assert report.ok, str(report)
    pipeline = autopar.compile(Tied(), "pp=2", **asked).pipeline
    assert pipeline is not None
    received = [one for one in (*pipeline.lists[0], *pipeline.lists[1]) if one.op == "RECV"]
    sums = [type_ for one in received for type_ in one.types if WORDS in type_.shape and one.action.kind in "BW"]
    assert [type_.dtype for type_ in sums] == [torch.float32]
