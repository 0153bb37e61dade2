"""verify computes in float64, and so do the tensors of the user's that no `model.double()` finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import verify
from autopar.errors import CaptureError

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


class Held(nn.Module):
    """A layer, and a matrix that is neither parameter nor buffer."""

    matrix: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.held()

    def held(self) -> Tensor:
        raise NotImplementedError


class Attribute(Held):
    """pytorch-tabnet: a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.rand(3, 3)

    def held(self) -> Tensor:
        return self.matrix


class Nested(Held):
    """In lists, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = [{"of": (torch.rand(3, 3), torch.rand(3))}]

    def held(self) -> Tensor:
        matrix, row = self.matrix[0]["of"]
        return torch.cat([matrix[:2], row[None]])


class Object(Held):
    """In an object: a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.distributions.Normal(torch.rand(3), torch.ones(3))

    def held(self) -> Tensor:
        return self.matrix.log_prob(self.layer.bias).diag()


class Global(Held):
    """A global tensor."""

    def held(self) -> Tensor:
        return WEIGHTS.diag()


class Legacy(Held):
    """pytorch-tabnet: torch.FloatTensor knows no default dtype."""

    def held(self) -> Tensor:
        return torch.sqrt(torch.FloatTensor([0.5]).to(self.layer.weight.device)).expand(3, 3)


class Written(Held):
    """A step writes into the attribute: refused, of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.rand(3, 3)

    def held(self) -> Tensor:
        return self.matrix.mul_(2.0)


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=WEIGHTS)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4), torch.arange(12) % 3


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("make", [Attribute, Nested, Object, Global, Legacy])
def test_a_tensor_that_the_user_holds(make: Any, mesh: str) -> None:
    torch.manual_seed(0)
    model = make()
    report = verify(model, mesh, loss_fn=weighted, batch=batch())
    assert report.ok and report.tolerance < 1e-9, str(report)
    assert WEIGHTS.dtype is torch.float32, "the user's own stays as it is"
    assert model.layer.weight.dtype is torch.float32


def test_a_write_into_one_is_still_refused() -> None:
    with pytest.raises(CaptureError, match=r"mul_\(2\.0\)"):
        verify(Written(), "dp=2", loss_fn=weighted, batch=batch())
