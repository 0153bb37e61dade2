"""A parallel model that nobody holds is gone at once: on a GPU its weights are most of the memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopar


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _left(mesh: str, **options: Any) -> int:
    """How many parameters are there after the last `del`, without a pass of the garbage collector."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    kept = [weakref.ref(p) for p in model.parameters()]
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn, **options)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        parallel.forward_backward(torch.randn(12, 6))
        optimizer.step()
        optimizer.zero_grad()
    del model, parallel, optimizer
    return sum(parameter() is not None for parameter in kept)


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"precision": "bf16"}, {"recompute": "full", "microbatches": 2})


@pytest.mark.parametrize("options", OPTIONS)
def test_on_one_rank(options: dict[str, Any]) -> None:
    _left("dp=1", **options)  # torch.fx.wrap, in what is imported then, keeps its frames until a collection
    gc.collect()
    gc.disable()
    try:
        assert _left("dp=1", **options) == 0
    finally:
        gc.enable()


def _on_ranks(rank: int) -> None:
    _left("dp=2", zero=3)
    gc.collect()
    gc.disable()
    try:
        for mesh, options in (("dp=2", {"zero": 3}), ("tp=2", {}), ("pp=2", {"microbatches": 2})):
            assert _left(mesh, **options) == 0, mesh
    finally:
        gc.enable()


@pytest.mark.gloo
def test_on_two_ranks(two: Ranks) -> None:
    two.run(_on_ranks)


def test_in_the_middle_of_a_step_of_another_model() -> None:
    """Red before, wherever the garbage collector came there: "OrderedDict mutated during iteration", out of torch."""

    def trained() -> tuple[Any, torch.optim.Optimizer]:
        parallel = autopar.parallelize(nn.Linear(6, 4), "dp=1", loss_fn=loss_fn, offload="optimizer")
        return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1)

    parallel, optimizer = trained()
    others: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *_: others.clear())
    others += trained()
    try:
        parallel.forward_backward(torch.ones(12, 6))
        optimizer.step()
    finally:
        handle.remove()
    assert not others
    before = parallel.weight.detach().full_tensor()
    optimizer.step()
    assert not torch.equal(before, parallel.weight.detach().full_tensor())
