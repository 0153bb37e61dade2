"""The test models themselves: they train, repeat, and their data do not let mistakes cancel."""

from __future__ import annotations

import pytest
import torch
from models_special import ZOO
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map


def double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def step(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, loss_fn, batch = ZOO[name]()
    model.double()
    batch = tree_map(double, batch)
    loss = model(*batch).loss if loss_fn is None else loss_fn(model, *batch)
    loss.backward()
    return model, loss


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_there_and_repeat(name: str):
    model, loss = step(name)
    again, same = step(name)
    assert loss.isfinite() and torch.equal(loss, same)
    for (key, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        if not a.requires_grad or key.startswith("unused"):
            assert a.grad is None, key
        else:
            assert a.grad is not None and torch.equal(a.grad, b.grad), key
            assert a.grad.abs().sum() > 0 or key.endswith(("k.bias", "key.bias")), key


@pytest.mark.parametrize("name", ZOO)
def test_no_two_rows_are_equal(name: str):
    _, _, batch = ZOO[name]()
    rows = {t.shape[0] for t in tree_flatten(batch)[0]}
    assert rows == ({7} if name == "odd_batch" else {12})
    first = tree_flatten(batch)[0][0]
    assert len({tuple(row.flatten().tolist()) for row in first}) == first.shape[0]
