"""What notes the user's functions that run leaves the user's own tools alone: a profile, a debugger, coverage."""

from __future__ import annotations

import cProfile
import pstats
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import capture

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
    found = capture(Model(), None, (torch.randn(2, 4),), {}, train=False)
    after_the_capture()
    profile.disable()
    assert any(name == "after_the_capture" for _, _, name in pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    assert "GAIN" in {root.name for root in found.ran.globals()}, "and what ran was noted"


def test_a_trace_function_is_put_back() -> None:
    def debugger(frame: FrameType, event: str, argument: Any) -> None: ...

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        found = capture(Model(), None, (torch.randn(2, 4),), {}, train=False)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert "GAIN" in {root.name for root in found.ran.globals()}
