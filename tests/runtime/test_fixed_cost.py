"""What a step costs outside of its program, in calls of functions: a number that only falls, on any machine.

In microseconds: `python -m benchmarks.launch`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from models import square_loss
from torch import nn

import autopar
from autopar.torch_compat import SUBCLASSED_DTENSORS


class Kept:
    """Stands for the runner of a program, and gives what it gave."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.result = runner, None

    def run(self, inputs: Any) -> Any:
        self.result = self.runner.run(inputs) if self.result is None else self.result
        return self.result


def calls(layers: int, optimizer: bool) -> int:
    """Of Python functions and of those in C, in one warm step."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model = autopar.parallelize(plain, "dp=1", loss_fn=square_loss)
    descent = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    x, y = torch.randn(2, 2, 4)
    count = 0

    def saw(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for step in range(4):
        descent.zero_grad()
        if step == 1:
            (running,) = model.programs
            running.runner = Kept(running.runner)  # type: ignore[assignment]
        before = sys.getprofile()
        sys.setprofile(saw if step == 3 and not optimizer else before)
        model.forward_backward(x, y)
        sys.setprofile(saw if step == 3 and optimizer else before)
        descent.step()
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("optimizer", "most"), [(False, 0.0), (True, 2.0)], ids=["step", "SGD"])
def test_calls_a_parameter(optimizer: bool, most: float) -> None:
    if optimizer and not SUBCLASSED_DTENSORS:
        pytest.skip("torch before 2.13 asks in Python for each op on a DTensor")
    few, many = calls(8, optimizer), calls(40, optimizer)
    assert few > 50, "nothing is counted"
    left = optimizer  # the call of what the first model, which is gone, left in torch's list: one a step
    assert (many - few - left) / 64 <= most
