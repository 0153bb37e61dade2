"""A weight that is masked, scaled or dropped out in part is a weight: tp splits it and never gathers it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from verified import verified

from autopar.api import compile
from autopar.ir.program import record
from autopar.verification.verify import verify


class Made(nn.Linear):
    """A layer whose weight is made anew at each step, as masked autoregressive nets do (MADE, nflows)."""

    def __init__(self, width: int, out: int, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(width, out)
        self.register_buffer("mask", torch.ones(out, width).tril(2))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.weight, self.mask), self.bias)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times a mask": lambda w, mask: w * mask,
    "filled": lambda w, mask: w.masked_fill(mask == 0, 0.0),
    "chosen": lambda w, mask: torch.where(mask > 0, w, 0.1 * w.detach()),
    "scaled by rows": lambda w, mask: w * mask.sum(1, keepdim=True) / 12,
    "dropped out": lambda w, _: F.dropout(w, 0.3),
    "of a constant": lambda w, _: w * torch.ones_like(w).triu(-3),
}


def net(make: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Made(12, 24, make), nn.ReLU(), Made(24, 12, make))


def pruned() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda way=way: net(way) for name, way in WAYS.items()},
    "torch.nn.utils.prune": pruned,
}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_split_however_long_the_batch(name: str) -> None:
    """With a long batch it would move less to gather the weights: no plan that tp was asked for."""
    for count in (12, 12000):
        found = compile(MODELS[name](), "tp=3", loss_fn=loss_fn, batch=torch.randn(count, 12))
        layouts = {entry.name: str(record(node).layout) for node, entry in found.program.parameters()}
        weights = [layout for one, layout in layouts.items() if "weight" in one]
        assert weights == ["[tp,-]", "[-,tp]"]
        assert [row.op for row in found.collectives if row.axis == "tp"] == ["all_reduce"]
        assert not [note for note in found.program.notes if "whole" in note]


@pytest.mark.parametrize("name", WAYS)
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    batch = (torch.randn(12, 12),)
    verified(MODELS[name](), ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), loss_fn, batch)
    verified(MODELS[name](), ("dp=2,tp=2",), loss_fn, batch, microbatches=3)


def test_a_pruned_module_is_copied_and_verified() -> None:
    """torch copies no tensor that was computed, and prune keeps one."""
    for mesh, options in (("dp=2,tp=2", {}), ("dp=2,tp=3", {}), ("dp=2,tp=2", {"microbatches": 3, "zero": 3})):
        report = verify(pruned(), mesh, loss_fn=loss_fn, batch=torch.randn(12, 12), **options)
        assert report.ok and report.max_error < 1e-10, report
