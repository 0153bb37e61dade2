"""Code that is exchanged between steps: classes of objects, the code of functions, what torch itself calls."""

from __future__ import annotations

import copy
import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

Patch = pytest.MonkeyPatch


class Factor:
    def of(self, x: Tensor) -> Tensor:
        return x * 1.5


class Larger(Factor):
    def of(self, x: Tensor) -> Tensor:
        return x * 3


class Curve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Sine(Curve):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.sin()


class Twice(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def shifted(x: Tensor, by: float = 0.5) -> Tensor:
    return x + by


def halved(x: Tensor, by: float = 0.5) -> Tensor:
    return x * by


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.curve = nn.Linear(6, 6), nn.Linear(6, 4), nn.LayerNorm(6), Curve()
        self.drop, self.factor, self.factors = nn.Dropout(0.0), Factor(), {"a": [Factor()]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.curve(self.norm(self.one(x)))
        x = self.factors["a"][0].of(self.factor.of(shifted(x)))
        return self.two(self.drop(x)) * 2


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def absolute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).abs().sum()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


LINEAR, LAYER, CALL = doubled(F.linear), doubled(nn.Linear.forward), doubled(nn.Module._wrapped_call_impl)
# What each does to the model, and how: what belongs to a model goes with it, the rest is taken back.
CHANGES: dict[str, Callable[[Any, Patch], object]] = {
    "class of a module": lambda m, p: p.setattr(m.curve, "__class__", Sine),
    "class of a layer": lambda m, p: p.setattr(m.norm, "__class__", Twice),
    "another layer of torch": lambda m, p: p.setattr(m.drop, "__class__", nn.Identity),
    "class of an object": lambda m, p: p.setattr(m.factor, "__class__", Larger),
    "class of an object in a list": lambda m, p: p.setattr(m.factors["a"][0], "__class__", Larger),
    "code of a function": lambda m, p: p.setattr(shifted, "__code__", halved.__code__),
    "code of a method": lambda m, p: p.setattr(Factor.of, "__code__", Larger.of.__code__),
    "code of the loss": lambda m, p: p.setattr(loss_fn, "__code__", absolute.__code__),
    "function that a layer calls": lambda m, p: p.setattr(F, "linear", LINEAR),
    "function that a function calls": lambda m, p: p.setattr(F, "mse_loss", F.l1_loss),
    "method of a layer": lambda m, p: p.setattr(nn.Linear, "forward", LAYER),
    "method of a tensor": lambda m, p: p.setattr(Tensor, "tanh", Tensor.sin),
    "call of a module": lambda m, p: p.setattr(nn.Module, "__call__", CALL),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_is_what_the_code_says_now(name: str) -> None:
    """Red before: all of them were read at the capture alone."""
    torch.manual_seed(0)
    plain = Net().double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    values = []
    for is_changed in (False, True, False, True):
        x, y = torch.randn(4, 6).double(), torch.randn(4, 4).double()
        with pytest.MonkeyPatch.context() as patch:
            CHANGES[name](plain, patch)
            plain.zero_grad()
            other = loss_fn(plain, x, y).item()
        with pytest.MonkeyPatch.context() as patch:
            if is_changed:
                CHANGES[name](plain, patch)
            value = loss_fn(plain, x, y)
            value.backward()
        with pytest.MonkeyPatch.context() as patch:
            if is_changed:
                CHANGES[name](getattr(model, "original", model), patch)
            model.zero_grad()
            torch.testing.assert_close(model.forward_backward(x, y), value.detach())
        grads = {key: p.grad for key, p in plain.named_parameters()}
        torch.testing.assert_close(model.full_gradients(), grads)
        values.append((value.item(), other))
    assert name == "another layer of torch" or values[0][0] != values[0][1], "it changes the loss"
    assert len(model.programs) == 2, "each is found again"


def test_what_no_step_calls_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = autopar.parallelize(Net(), "dp=1", loss_fn=loss_fn)
    x, y = torch.randn(4, 6), torch.randn(4, 4)
    model.forward_backward(x, y)
    monkeypatch.setattr(F, "gelu", doubled(F.gelu))
    monkeypatch.setattr(Tensor, "smart", doubled(Tensor.sin), raising=False)
    monkeypatch.setattr(nn.Conv1d, "forward", doubled(nn.Conv1d.forward))
    model.forward_backward(x, y)
    assert len(model.programs) == 1


def test_values_that_a_function_of_apply_changes_are_refused() -> None:
    """Red before: nothing happened. What `.to()` and `.to_empty()` call is let be."""
    model = autopar.parallelize(Net(), "dp=1", loss_fn=loss_fn)
    with pytest.raises(AutoparError, match=r"_apply with a function that changes values.*copy_"):
        model._apply(lambda tensor: tensor * 2)
    was = model.one.weight.full_tensor().clone()
    assert model.to_empty(device="cpu") is model and model.to("cpu").share_memory() is model
    assert torch.equal(model.one.weight.full_tensor(), was)


# What is not exchanged, and tells another thing than before.

SHARES = {"share": 1.0}
SETTINGS = types.ModuleType("autopar_test_settings")


class Asks(nn.Module):
    def __init__(self, asked: Callable[[], float]) -> None:
        super().__init__()
        self.one, self.asked, self.shares = nn.Linear(6, 4), asked, types.MappingProxyType(SHARES)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.asked() * self.shares["share"]


TOLD: dict[str, tuple[Callable[[], float], Callable[[Patch], object]]] = {
    "view of a dict": (lambda: 1.0, lambda p: p.setitem(SHARES, "share", 3.0)),
    "module by its name": (
        lambda: sys.modules["autopar_test_settings"].share, lambda p: p.setattr(SETTINGS, "share", 3.0)
    ),
    "module that is imported by its name": (
        lambda: importlib.import_module("autopar_test_settings").share, lambda p: p.setattr(SETTINGS, "share", 3.0)
    ),
    "setting of torch": (
        lambda: 3.0 if torch.backends.cudnn.benchmark else 1.0,
        lambda p: p.setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "function that tells a setting": (
        lambda: float(torch.get_num_threads()), lambda p: torch.set_num_threads(2)
    ),
    "anomaly detection": (
        lambda: 3.0 if torch.is_anomaly_enabled() else 1.0,
        lambda p: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ),
    "attention that is allowed": (
        lambda: 3.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0,
        lambda p: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "filled memory": (
        lambda: 3.0 if torch.utils.deterministic.fill_uninitialized_memory else 1.0,
        lambda p: p.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "folder": (lambda: float(len(os.getcwd()) > 1) + 1, lambda p: p.chdir("/")),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_a_step_asks_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: it went on with the first answer."""
    asked, change = TOLD[name]
    monkeypatch.setattr(SETTINGS, "share", 1.0, raising=False)
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    plain = Asks(asked).double()
    model = autopar.parallelize(plain, "dp=1", loss_fn=loss_fn)
    x, y = torch.randn(4, 6).double(), torch.randn(4, 4).double()
    first = model.forward_backward(x, y)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        second = model.forward_backward(x, y)
        with model.gathered() as whole:
            torch.testing.assert_close(second, loss_fn(whole, x, y).detach())
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.autograd.set_detect_anomaly(False)
    assert first != second
    assert model.forward_backward(x, y) == first and len(model.programs) == 2
