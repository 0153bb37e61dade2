"""Integers that are inputs of a program have the range that they have in Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.beta: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


INTEGERS = (1, 5, 7, 10**10, 2**62, 2**63 - 1, -(2**63), 2**63, 10**20, 3, -1)
OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    "quotient": lambda n: n / 1e18,
    "product": lambda n: 1 + n * n / 1e30,
    "sum": lambda n: (n + 2**62) / 1e18,
    "remainder": lambda n: n % 97,
    "difference of powers": lambda n: n**3 - (n - 1) ** 3 - 3 * n * n,
    "whole quotient": lambda n: n // 10**6 % 1000,
    "met by a tensor": lambda n: n,
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_have_the_range_of_python(name: str) -> None:
    """No wrap at 2^63, and where a tensor meets more than torch takes, torch's own error."""
    compute = OF_INTEGERS[name]
    torch.manual_seed(0)
    plain = Model().double()
    loss_fn = partial(by_integer, compute)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn, device="cpu")
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    for value in INTEGERS:
        plain.beta = model.beta = value
        try:
            want = loss_fn(plain, x, y).detach()
        except OverflowError as error:
            with pytest.raises(CaptureError, match=str(error)):
                model.forward_backward(x, y)
        else:
            torch.testing.assert_close(model.forward_backward(x, y), want, rtol=1e-12, atol=0)
    assert name == "met by a tensor" or len(model.programs) == 3


def by_integer(compute: Callable[[Any], Any], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x) * compute(model.beta), y)
