"""What hooks and autograd Functions of the user's read and change outside of modules, in the backward pass alone."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

COUNT, SCALE = 0, 2.0
CALLS: list[int] = []


class Counter:
    calls = 0


class Between(nn.Module):
    """A function between two layers, which no code names."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


def with_backward(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An autograd Function of which the backward pass is this."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return change(g)

    return Scaled.apply  # type: ignore[no-any-return]


def with_hook(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(change)
        return y

    return function


def by_global(g: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return g * COUNT


def by_class(g: Tensor) -> Tensor:
    Counter.calls += 1
    return g * Counter.calls


def by_list(g: Tensor) -> Tensor:
    CALLS.append(1)
    return g * len(CALLS)


def late(g: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return g * 3 if COUNT > 500 else g * 2


def idly(g: Tensor) -> Tensor:
    """Nor does a constant nan, which is equal to nothing, make two runs differ."""
    global COUNT
    COUNT += 1
    CALLS.append(COUNT)
    Counter.calls += 1
    return torch.where(g.isnan(), torch.tensor(float("nan"), dtype=g.dtype), g * 2)


def scaled(g: Tensor) -> Tensor:
    return g * SCALE


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch() -> Tensor:
    return torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6)


def made(function: Callable[[Tensor], Tensor]) -> Between:
    torch.manual_seed(0)
    return Between(function).double()


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COUNT", 0), ("SCALE", 2.0), ("CALLS", [])):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Counter, "calls", 0)


@pytest.mark.parametrize("wrapped", [with_backward, with_hook])
@pytest.mark.parametrize(
    ("change", "name"), [(by_global, "'COUNT'"), (by_class, "'Counter.calls'"), (by_list, "'CALLS'"), (late, "'COUNT'")]
)
def test_what_a_backward_pass_counts_and_uses_is_refused(change: Any, name: str, wrapped: Any) -> None:
    """Red before: the number of the capture was that of every step, in silence."""
    with pytest.raises(CaptureError) as caught:
        autopar.verify(made(wrapped(change)), "dp=2", loss_fn=loss_fn, batch=batch(), steps=3)
    assert str(caught.value).startswith(f"what a step does hangs on what changes while it runs: {name} (")


class Shrinking(Between):
    """Its step writes a parameter, for which it is traced once more."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("wrapped", [with_backward, with_hook])
def test_a_step_that_is_traced_again_is_looked_at_too(wrapped: Any) -> None:
    """Red before: the code of the first trace's backward pass was no new one in the second."""
    with pytest.raises(CaptureError, match="what a step does hangs on what changes while it runs: 'COUNT'"):
        autopar.verify(Shrinking(wrapped(by_global)).double(), "dp=2", loss_fn=loss_fn, batch=batch(), steps=3)


def of_a_variable() -> Callable[[Tensor], Tensor]:
    count = 0

    def change(g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return g * count

    return change


def of_an_iterator() -> Callable[[Tensor], Tensor]:
    numbers = itertools.count(1)
    return lambda g: g * next(numbers)


def of_a_clock() -> Callable[[Tensor], Tensor]:
    return lambda g: g * (time.perf_counter() % 3)


@pytest.mark.parametrize("wrapped", [with_backward, with_hook])
@pytest.mark.parametrize("make", [of_a_variable, of_an_iterator, of_a_clock])
def test_a_number_that_is_another_one_each_time_is_refused(make: Any, wrapped: Any) -> None:
    with pytest.raises(CaptureError, match=r"another one each time it runs, at .*test_backward_globals\.py:\d+\n"):
        autopar.verify(made(wrapped(make())), "dp=2", loss_fn=loss_fn, batch=batch(), steps=3)


@pytest.mark.parametrize("wrapped", [with_backward, with_hook])
def test_what_it_counts_alone_is_right(wrapped: Any) -> None:
    report = autopar.verify(made(wrapped(idly)), "dp=2", loss_fn=loss_fn, batch=batch(), steps=3)
    assert report.ok, str(report)


@pytest.mark.parametrize("wrapped", [with_backward, with_hook])
def test_a_global_that_it_reads_has_a_program_for_each_value(wrapped: Any) -> None:
    plain = made(wrapped(scaled))
    parallel = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for value in (2.0, 3.0, 3.0, 5.0):
        globals()["SCALE"] = value
        plain.zero_grad()
        parallel.zero_grad()
        loss_fn(plain, batch()).backward()
        parallel.forward_backward(batch())
        for mine, its in zip(parallel.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)
