"""copy.deepcopy inside of a step: a copy without a gradient, as the plain module makes one, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from verified import verified

from autopar.errors import CaptureError

Body = Callable[["Copying", Tensor, Tensor], Tensor]


class Copying(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 8), nn.Linear(8, 4), body
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, x, self.up(x))).square().mean()


def nested(model: Copying, x: Tensor, h: Tensor) -> Tensor:
    """One tensor twice is one copy twice."""
    kept = copy.deepcopy({"x": x, "again": [x], "h": h.detach(), "n": 3})
    kept["x"].add_(1)
    return h * kept["n"] + kept["again"][0] + kept["h"]


COPIES: dict[str, Body] = {
    "an input": lambda model, x, h: h + copy.deepcopy(x).mul_(2) * x,
    "what is detached": lambda model, x, h: h + copy.deepcopy(h.detach()),
    "a parameter": lambda model, x, h: h + copy.deepcopy(model.up.weight).sum(0),
    "a buffer": lambda model, x, h: h + copy.deepcopy(model.shift),
    "nested": nested,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_the_plain_modules(name: str) -> None:
    torch.manual_seed(0)
    model, x = Copying(COPIES[name]), torch.randn(4, 8)
    verified(model, ("dp=2,tp=2",), None, (x,))


def test_what_an_op_computed_is_refused_as_torch_does() -> None:
    """With the line; plain torch refuses it in the same words."""
    model, x = Copying(lambda model, x, h: copy.deepcopy(h)), torch.randn(4, 8)
    words = "Only Tensors created explicitly by the user"
    with pytest.raises(RuntimeError, match=words):
        model(x)
    with pytest.raises(CaptureError, match=rf"(?s)test_deep_copies\.py:\d+.*copy\.deepcopy\(h\).*{words}"):
        verified(model, ("dp=2",), None, (x,))


def test_copies_that_would_share_memory_are_refused() -> None:
    def body(model: Copying, x: Tensor, h: Tensor) -> Tensor:
        one, part = copy.deepcopy([x, x[:, :4]])
        one.add_(1)
        return h + one + part.sum(-1, keepdim=True)

    with pytest.raises(CaptureError, match=r"(?s)test_deep_copies\.py:\d+.*share memory.*x\.detach\(\)\.clone\(\)"):
        verified(Copying(body), ("dp=2",), None, (torch.randn(4, 8),))
