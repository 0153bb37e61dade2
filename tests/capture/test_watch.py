"""What notes the user's functions that run leaves the user's own tools alone: a profile, a debugger, coverage."""

from __future__ import annotations

import cProfile
import gc
import pstats
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.capture import capture
from autopar.capture.step_kind import StepKind

GAIN = 2.0


def gained(x: Tensor) -> Tensor:
    return x * GAIN


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return gained(self.inner(x)).sum()


def after_the_capture() -> None: ...


def test_a_profile_goes_on() -> None:
    profile = cProfile.Profile()
    profile.enable()
    found = capture(Model(), None, (torch.randn(2, 4),), {}, kind=StepKind.OUTPUT)
    after_the_capture()
    profile.disable()
    assert any(name == "after_the_capture" for _, _, name in pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    assert "GAIN" in {root.name for root in found.ran.globals()}, "and what ran was noted"


def test_a_trace_function_is_put_back() -> None:
    def debugger(frame: FrameType, event: str, argument: Any) -> None: ...

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        found = capture(Model(), None, (torch.randn(2, 4),), {}, kind=StepKind.OUTPUT)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert "GAIN" in {root.name for root in found.ran.globals()}


collected = 0.5  # numbers that change in every step, and that no step reads
freed = 0.5
signalled = 0.5


def count_collected(phase: str, info: object) -> None:
    global collected
    collected += more(1)


def more(number: int) -> int:
    return number * STEP


STEP = 1


class Freed:
    def __del__(self) -> None:
        global freed
        freed += 1


def count_signals(number: int, frame: FrameType | None) -> None:
    global signalled
    signalled += 1


class Interrupted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Freed()
        gc.collect()
        signal.raise_signal(signal.SIGUSR1)
        return super().forward(x) * GAIN


@contextmanager
def interruptions() -> Iterator[None]:
    gc.callbacks.append(count_collected)
    before = signal.signal(signal.SIGUSR1, count_signals)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        gc.callbacks.remove(count_collected)


@contextmanager
def traced() -> Iterator[None]:
    profile = cProfile.Profile()
    with profile:  # what ran is then noted by a trace function
        yield


@pytest.mark.parametrize("tools", [(interruptions,), (interruptions, traced)], ids=["profile", "trace"])
def test_what_interrupts_the_step_is_no_part_of_it(tools: tuple[Callable[[], Any], ...]) -> None:
    """hypothesis counts the time of garbage collections in a global: it was read as a number of the step's, so that
    a collection ran ops of tensors, and every step was compiled anew."""
    with ExitStack() as stack:
        for tool in tools:
            stack.enter_context(tool())
        model = autopar.parallelize(Interrupted(4, 4), mesh="dp=1", loss_fn=lambda model, x: model(x).sum())
        before = freed, collected, signalled
        for _ in range(3):
            model.forward_backward(torch.randn(2, 4))
            assert {type(freed), type(collected), type(signalled)} == {float}
    assert len(model.programs) == 1
    assert freed > before[0] and collected > before[1] and signalled > before[2]


SIZE, PACKED, SEEN = 2, 1.0, 1


class Size:
    def __index__(self) -> int:
        return SIZE


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if SEEN else None


def packed(x: Tensor) -> Tensor:
    return x * PACKED


def by_an_index(x: Tensor) -> Tensor:
    return x.narrow(1, 0, Size())  # type: ignore[arg-type]


def by_a_mode(x: Tensor) -> Tensor:
    with Mode():
        return x.exp()


def by_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
        return x.exp()


@pytest.mark.parametrize(("function", "name"), [(by_an_index, "SIZE"), (by_a_mode, "SEEN"), (by_hooks, "PACKED")])
def test_what_torch_calls_is_noted(function: Callable[[Tensor], Tensor], name: str) -> None:
    """Functions of the user's that run inside of a torch function, though most of these are not watched."""
    model = nn.Linear(4, 4)
    found = capture(model, lambda model, x: function(model(x)).sum(), (torch.randn(2, 4),), {})
    assert name in {root.name for root in found.ran.globals()}


def test_the_shapes_of_a_custom_op_are_noted() -> None:
    """The function that gives them may read what decides them."""

    @torch.library.custom_op("tests_watch::shaped", mutates_args=())
    def shaped(x: Tensor) -> Tensor:
        return x.new_zeros(SIZE)

    @shaped.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(SIZE)

    found = capture(nn.Linear(4, 4), lambda m, x: m(x).sum() + shaped(x).sum(), (torch.randn(2, 4),), {})
    assert "SIZE" in {root.name for root in found.ran.globals()}
