"""Weights that a model reads by a view, or whose gradient comes by one: with ZeRO they lie as split as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import pairs
from torch import Tensor, nn

import autopar
from autopar.ir.program import record

Product = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, tuple[tuple[int, ...], Product]] = {
    "linear": ((64, 32), F.linear),
    "t": ((64, 32), lambda x, w: x @ w.t()),
    "mT": ((64, 32), lambda x, w: x @ w.mT),
    "transpose": ((64, 32), lambda x, w: x @ w.transpose(0, 1)),
    "permute": ((64, 32), lambda x, w: x @ w.permute(1, 0)),
    "plain": ((32, 64), lambda x, w: x @ w),
    "view": ((64 * 32,), lambda x, w: x @ w.view(32, 64)),
    "bmm": ((4, 32, 64), lambda x, w: torch.bmm(x[None].expand(4, -1, -1), w).sum(0)),
    "bmm of views": ((4, 64, 32), lambda x, w: torch.bmm(x[None].expand(4, -1, -1), w.transpose(1, 2)).sum(0)),
    "scaled": ((64, 32), lambda x, w: F.linear(x, w * 0.5)),
    "centred": ((64, 32), lambda x, w: F.linear(x, w - w.mean())),
    "twice": ((64, 32), lambda x, w: F.linear(x, w) + x @ w.t()),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        shape, self.product = PRODUCTS[kind]
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(64, 8)
        self.weight = nn.Parameter(0.1 * torch.randn(shape, generator=generator))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.relu(self.product(self.first(x), self.weight))), y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 16, generator=generator), torch.randint(0, 8, (12,), generator=generator)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_no_parameter_is_kept_and_no_gradient_is_whole(kind: str):
    """Red before: `x @ w.t()` kept the gathered weight from the forward to the backward pass, and added up the whole
    gradient over micro-batches."""
    compiled = autopar.compile(Net(kind), "dp=2", batch=batch(), zero=3, microbatches=2)
    graphs = compiled.pipeline.graphs
    given = [entry.name for _, entry in graphs[0, "B"].entries if entry.kind == "saved"]
    assert not [name for name in given if "gather" in name]
    sums = [node for node, entry in graphs[0, "E"].entries if entry.kind == "step" and record(node).type.shape]
    assert sums and not [node for node in sums if record(node).layout.partial]


@pytest.mark.parametrize(
    ("kind", "mesh", "zero"),
    list(pairs(("t", "view", "bmm of views", "twice"), ("dp=2", "dp=3", "dp=2,tp=2", "pp=2,dp=2"), (2, 3))),
)
def test_numbers(kind: str, mesh: str, zero: int):
    """Every kind on every mesh, and with each of the two; all three together in `make test-all`."""
    options: dict[str, Any] = {"zero": zero, "microbatches": 2}
    assert autopar.verify(Net(kind), mesh, batch=batch(), **options).ok
