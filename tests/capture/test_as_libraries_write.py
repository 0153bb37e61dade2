"""What libraries of PyPI write, each as a small model of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import verify
from autopar.errors import CaptureError


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Gathered(nn.Module):
    """g-mlp-pytorch: the layers that a draw has left are called as a Sequential made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Any:
        return nn.Sequential(*self.layers)(x)


class Made(Gathered):
    """Beside its own layers one that no optimizer knows."""

    def forward(self, x: Tensor) -> Any:
        return nn.Sequential(*self.layers, nn.Linear(8, 8, dtype=x.dtype))(x)


class Bytes(nn.Module):
    """pytorch-crf: a mask of bytes chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mask = (x > 0).to(torch.uint8)
        return torch.where(mask, y, -y) + y.where(mask, x)


class Marked(nn.Module):
    """vector-quantize-pytorch: a sum of losses begins with a buffer that is marked as one with a gradient."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("zero", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        total = self.zero
        total.requires_grad_()
        return self.inner(x) + total


class Locked(Gathered):
    """Something that Python cannot copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Keeping(Gathered):
    """snntorch, gpytorch: what a call computed stays in a list."""

    def forward(self, x: Tensor) -> Any:
        self.kept = [super().forward(x)]
        return self.kept[0]


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("make", [Gathered, Bytes, Marked])
@pytest.mark.filterwarnings("ignore:where received a uint8:UserWarning")
def test_taken(make: Any, mesh: str, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(make(), mesh, loss_fn=squares, batch=torch.randn(12, 8), **options)
    assert report.ok, str(report)


def test_a_layer_that_is_made_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"that is made in the loss function|made while the model runs"):
        verify(Made(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(CaptureError, match=r"copy\.deepcopy of Locked fails: TypeError: cannot pickle"):
        verify(Locked(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))


def test_a_model_that_keeps_what_it_computed_is_named() -> None:
    model, x = Keeping(), torch.randn(12, 8)
    model(x)
    with pytest.raises(
        CaptureError, match=r"copy\.deepcopy of Keeping fails: .*give verify a model that has not run yet"
    ):
        verify(model, "dp=2", loss_fn=squares, batch=x)
