"""What hooks of the user's change in the backward pass: as on one device, or refused with the line."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Hooked(nn.Module):
    """A model whose forward pass registers a hook, or calls `register`."""

    def __init__(self, function: Callable[[Hooked, Tensor], Tensor | None], register: str = "value") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))
        self.function, self.register, self.calls, self.scale = function, register, 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.register == "parameter":
            self.up.weight.register_hook(lambda g: g * 2)
        if self.register == "module" or (self.register == "module once" and self.calls == 0):
            self.calls = 1
            self.down.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
        if self.register == "value":
            h.register_hook(lambda g: self.function(self, g))
        return self.down(h) * self.scale + self.mean


def binds_a_buffer(model: Hooked, g: Tensor) -> None:
    model.mean = model.mean * 0.5 + g.detach().sum(0)


def writes_a_buffer(model: Hooked, g: Tensor) -> Tensor:
    model.mean.mul_(0.5).add_(g.detach().sum(0))
    return g * 2


def logs(model: Hooked, g: Tensor) -> None:
    model.calls += 1
    model.last = g


def draws(model: Hooked, g: Tensor) -> Tensor:
    return nn.functional.dropout(g, 0.5) + torch.randn_like(g)


def scales_by_count(model: Hooked, g: Tensor) -> Tensor:
    model.calls += 1
    return g * model.calls


def scales_the_next(model: Hooked, g: Tensor) -> None:
    model.scale = model.scale + 1


def keeps_a_tensor(model: Hooked, g: Tensor) -> None:
    model.scale = g.detach().mean()


def draws_in_python(model: Hooked, g: Tensor) -> Tensor:
    return g * random.random()


def made(function: Callable[[Hooked, Tensor], Tensor | None], register: str = "value") -> Hooked:
    torch.manual_seed(0)
    return Hooked(function, register).double()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("function", [binds_a_buffer, writes_a_buffer, logs, draws])
def test_hooks_are_as_on_one_device(function: Callable[[Hooked, Tensor], Tensor | None], mesh: str) -> None:
    report = autopar.verify(made(function), mesh, loss_fn=square, batch=X)
    assert report.ok, report


def test_hooks_that_the_first_step_alone_registers_run_in_each() -> None:
    assert autopar.verify(made(logs, "module once"), "dp=2", loss_fn=square, batch=X).ok


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (scales_by_count, "'calls' (test_backward_changes.py:"),
        (scales_the_next, "'scale' (test_backward_changes.py:"),
        (keeps_a_tensor, "'scale' (test_backward_changes.py:"),
        (draws_in_python, "return g * random.random()"),
    ],
)
def test_a_step_that_depends_on_the_backward_pass_before_it_is_refused(
    function: Callable[[Hooked, Tensor], Tensor | None], line: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.verify(made(function), "dp=2", loss_fn=square, batch=X)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("register", "what"),
    [
        ("parameter", "self.up.weight.register_hook(lambda g: g * 2)\nThis line has a backward hook of the gradient of "
         "the parameter 'up.weight', which is still there after the step."),
        ("module", "This line has a backward hook of the module 'down', which is still there after the step."),
    ],
)  # fmt: skip
def test_hooks_that_each_step_adds_are_refused(register: str, what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.verify(made(logs, register), "dp=2", loss_fn=square, batch=X)
    assert what in str(caught.value)
