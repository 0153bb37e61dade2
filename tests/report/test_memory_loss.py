"""What the loss of a large vocabulary needs on a GPU: the logits, and pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

TOKENS, VOCABULARY = 8192, 128256
MIB = 1 << 20


def plain(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels.flatten())


def as_transformers(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The logits are made wider, then a view of them is taken."""
    return F.cross_entropy(model(x).float().view(-1, VOCABULARY), labels.view(-1))


@pytest.mark.parametrize(
    ("loss_fn", "dtype", "options", "itemsize"),
    [
        (plain, torch.float32, {}, 4),
        (plain, torch.bfloat16, {}, 2),
        (plain, torch.float32, {"precision": "bf16"}, 2),
        (as_transformers, torch.float32, {"precision": "bf16"}, 2),
    ],
)
def test_a_loss_needs_the_logits_and_little_more(
    loss_fn: Any, dtype: torch.dtype, options: dict[str, Any], itemsize: int
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, VOCABULARY, bias=False)).to(dtype)
        batch = torch.empty(TOKENS, 8, dtype=dtype), torch.empty(TOKENS, dtype=torch.int64)
    compiled = autopar.compile(model, "dp=1", loss_fn=loss_fn, batch=batch, **options)
    report = compiled.memory(0, device="cuda")
    logits = TOKENS * VOCABULARY * itemsize
    assert logits <= report.step - sum(report.states.values()) + report.states["gradients"] <= logits + 256 * MIB
