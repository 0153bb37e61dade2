"""`batch_statistics="microbatch"` on ranks that are processes, beside a loop of plain PyTorch over micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from norm_case import Net, X, Y, loop, mse, norm
from processes import Ranks
from torch import nn

import autopar

pytestmark = pytest.mark.gloo

# norm, mesh, how batches are passed, micro-batches, other options; how the plain loop has ranks and parts
CASES: dict[str, tuple[Any, str, str, dict[str, Any], int, int]] = {
    "ranks": (norm(), "dp=2", "global", {}, 2, 1),
    "micro-batches": (norm(), "dp=2", "global", {"microbatches": 3}, 2, 3),
    "own parts": (norm(), "dp=2", "local", {"microbatches": 3}, 2, 3),
    "cumulative": (norm(momentum=None), "dp=2", "global", {"microbatches": 2, "zero": 3}, 2, 2),
    "stages": (norm(), "pp=2", "global", {"microbatches": 3}, 1, 3),
    "synchronised": (lambda: nn.SyncBatchNorm(5), "dp=2", "global", {}, 1, 1),
}


def _train(rank: int) -> list[str]:
    failed = []
    for name, (make, mesh, how, options, ranks, parts) in CASES.items():
        plain = Net(make)
        given: Any = {"loss_fn": mse, "batch_statistics": "microbatch", "batch": how, **options}
        model = autopar.parallelize(copy.deepcopy(plain), mesh, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            x, y = (t.chunk(2)[rank] if how == "local" else t for t in (X, Y))
            losses.append(model.forward_backward(x, y).detach())
            optimizer.step()
        if isinstance(plain.b, nn.SyncBatchNorm):  # which no loop on one rank runs while ranks are joined
            plain.b = copy.copy(plain.b)
            plain.b.__class__ = nn.BatchNorm1d
        want = loop(plain, X, ranks, parts)
        state = model.state_dict()
        found = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
        found |= {f"loss {step}": loss for step, loss in enumerate(losses)}
        wrong = [
            key for key, value in want.items() if not torch.allclose(found[key].double(), value.double(), 1e-9, 1e-12)
        ]
        failed += [f"{name}: {key}" for key in wrong]
        model.eval()
        model(X[:4].chunk(2)[rank] if how == "local" else X[:4])
    return failed


def test_ranks_train_as_a_loop_over_micro_batches(two: Ranks) -> None:
    assert two.run(_train) == [[], []]
