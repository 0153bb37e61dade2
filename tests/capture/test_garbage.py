"""Python's collector of cycles is off while a model is compiled, and as the user had it before and after."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


class Looks(nn.Linear):
    def __init__(self, fails: bool = False) -> None:
        super().__init__(4, 4)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        assert not gc.isenabled()
        if self.fails:
            raise ValueError("as asked")
        return super().forward(x)


def compiled(model: nn.Module) -> autopar.Compiled:
    return autopar.compile(model, "dp=2", loss_fn=lambda model, x: model(x).sum(), batch=torch.randn(4, 4))


def test_it_is_off_meanwhile_and_on_again() -> None:
    compiled(Looks())
    assert gc.isenabled()
    with pytest.raises(AutoparError, match="as asked"):
        compiled(Looks(fails=True))
    assert gc.isenabled()


def test_it_stays_off_where_the_user_has_it_off() -> None:
    gc.disable()
    try:
        compiled(Looks())
        assert not gc.isenabled()
    finally:
        gc.enable()
