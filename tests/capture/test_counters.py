"""Numbers that a step changes in Python: they may stay as they are, unless what a step does hangs on them."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.capture.step_kind import StepKind
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.held, self.rate = nn.Linear(3, 2), 0, {"calls": 0}, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Late(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * 2 if self.calls > 100 else self.layer(x)


class Often(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.held["calls"] += 1
        return self.layer(x) * 2 if not self.held["calls"] % 50 else self.layer(x)


class Decays(Net):
    """A float, compared with a float."""

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.5
        return self.layer(x) * max(self.rate, 2.0)


class Chooses(Net):
    """By an index: no comparison is made."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0] * 100 + [2.0] * 10_000

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.factors[self.calls]


class Share(Net):
    """An integer that meets a float."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * 2 if self.calls / 10.0 > 4.5 else self.layer(x)


class Counts(Net):
    """What nothing hangs on: a note alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 10 == 0:
            print("ten more")
        return self.layer(x)


class Criterion:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, out: Tensor) -> Tensor:
        self.seen += 1
        return out.square().mean() * (2 if self.seen >= 30 else 1)


LATE = 0


def _of_object() -> Callable[..., Tensor]:
    criterion = Criterion()
    return lambda model, x: criterion(model(x))


def _of_dict() -> Callable[..., Tensor]:
    held = {"steps": 0}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        held["steps"] += 1
        return model(x).square().mean() * (2 if held["steps"] == 40 else 1)

    return loss


def _of_cell() -> Callable[..., Tensor]:
    steps = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return model(x).square().mean() if steps < 40 else model(x).abs().mean()

    return loss


def _of_global() -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        global LATE
        LATE += 1
        return model(x).square().mean() if LATE < 40 else model(x).abs().mean()

    return loss


def _of_list() -> Callable[..., Tensor]:
    history = [0.0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        history.append(1.0)
        return model(x).square().mean() if len(history) < 40 else model(x).abs().mean()

    return loss


def _of_deque() -> Callable[..., Tensor]:
    recent: collections.deque[float] = collections.deque(maxlen=50)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        recent.append(1.0)
        return model(x).square().mean() if len(recent) < 50 else model(x).abs().mean()

    return loss


def _of_rest() -> Callable[..., Tensor]:
    rest = [1.0] * 40

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if rest:
            rest.pop()
            return model(x).square().mean()
        return model(x).abs().mean()

    return loss


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


DECIDE: dict[str, tuple[type[Net], Callable[[], Callable[..., Tensor]], str]] = {
    "an attribute": (Late, lambda: square, "'calls', at"),
    "an item of an attribute": (Often, lambda: square, "held['calls']'"),
    "a float": (Decays, lambda: square, "'rate'"),
    "an index": (Chooses, lambda: square, "'calls'"),
    "a share": (Share, lambda: square, "self.calls / 10.0 > 4.5"),
    "an object of the loss": (Net, _of_object, "'criterion.seen'"),
    "a dict of the loss": (Net, _of_dict, "'held['steps']'"),
    "a variable of a closure": (Net, _of_cell, "'steps'"),
    "a global": (Net, _of_global, "'LATE'"),
    "a list": (Net, _of_list, "'history'"),
    "a deque that is full": (Net, _of_deque, "'recent'"),
    "a list that is empty": (Net, _of_rest, "'rest'"),
}


def _state(model: Net) -> tuple[Any, ...]:
    return model.calls, dict(model.held), model.rate


@pytest.mark.parametrize("name", DECIDE)
def test_what_a_step_does_may_not_hang_on_them(name: str) -> None:
    """Red before: the first step's branch was taken for ever, in silence."""
    make, loss, text = DECIDE[name]
    model = make()
    before = _state(model)
    with pytest.raises(CaptureError, match=f"(?s)hangs on what changes while it runs: .*{re.escape(text)}"):
        capture(model, loss(), (torch.randn(4, 3),), {})
    assert _state(model) == before
    assert all(type(value) in (int, float) for value in (model.calls, model.held["calls"], model.rate, LATE))


def test_no_items_are_taken_of_an_iterator() -> None:
    counts = itertools.count()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2 if next(counts) > 100 else 1)

    with pytest.raises(CaptureError, match="takes the next item of 'counts'"):
        capture(Net(), loss, (torch.randn(4, 3),), {})
    assert isinstance(next(counts), int)


@pytest.mark.parametrize("kind", [StepKind.TRAINING, StepKind.OUTPUT])
def test_what_nothing_hangs_on_is_told(kind: StepKind) -> None:
    model = Counts()
    program = capture(model, square if kind.trains else None, (torch.randn(4, 3),), {}, kind=kind).program
    assert any(note.startswith("'calls' is changed at test_counters.py:") for note in program.notes), program.notes
    assert model.calls == 0 and type(model.calls) is int


def test_what_changes_outside_of_the_model_is_told() -> None:
    """It is counted by the capture's own two runs, and stays a number."""
    held, history = {"steps": 5}, [0.0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        held["steps"] += 1
        history.append(1.0)
        return model(x).square().mean()

    notes = capture(Net(), loss, (torch.randn(4, 3),), {}).program.notes
    for name in ("held['steps']", "history"):
        assert any(note.startswith(f"'{name}' (test_counters.py") for note in notes), notes
    assert (type(held["steps"]), held["steps"], history) == (int, 7, [0.0, 1.0, 1.0])


def test_a_flag_that_a_loop_sets_has_a_program_for_each_value() -> None:
    """What the refusal says to write."""
    model = Net()
    model.is_late = False  # type: ignore[assignment]

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2 if model.is_late else 1)

    parallel, x = autopar.parallelize(model, "dp=1", loss_fn=loss), torch.randn(4, 3)
    early = float(parallel.forward_backward(x))
    parallel.is_late = True
    assert float(parallel.forward_backward(x)) == pytest.approx(2 * early)


class OfClass(Net):
    """In a place where no other number can be put: nobody knows what hangs on it, and that is said."""

    total = 0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.total += 1
        return self.layer(x) * 2 if OfClass.total > 100 else self.layer(x)


def test_what_cannot_be_followed_is_told() -> None:
    notes = capture(OfClass(), square, (torch.randn(4, 3),), {}).program.notes
    assert any("OfClass.total" in note and "was not found out" in note for note in notes), notes
