"""While a model is captured, what stands for its parameters is asked whether it is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    """A loop in which what is no parameter would be left out in silence."""
    penalty = [p.square().sum() for p in model.parameters() if isinstance(p, nn.Parameter)]
    return model(x).square().mean() + 0.1 * torch.stack(penalty).sum()


def by_name(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + 0.1 * model.get_parameter("0.weight").square().sum()


def of_lists(model: nn.Module, x: Tensor) -> Tensor:
    return (
        model(x).square().mean()
        + 0.1 * torch.stack([p.abs().sum() for p in nn.ParameterList(model.parameters())]).sum()
    )


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("loss", [of_parameters, by_name, of_lists])
def test_a_penalty_asks_what_is_a_parameter(loss: object, mesh: str) -> None:
    report = autopar.verify(_net(), mesh, loss_fn=loss, batch=X)  # type: ignore[arg-type]
    assert report.ok, report


def test_frozen_ones_are_parameters_too() -> None:
    model = _net()
    model[0].requires_grad_(False)  # type: ignore[index]
    report = autopar.verify(model, "dp=2", loss_fn=of_parameters, batch=X)
    assert report.ok, report


class Tied(nn.Module):
    """Ties its weights in each forward pass, and keeps one under another name."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.keeps = nn.Linear(4, 4), nn.Linear(4, 4), keeps
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight = self.first.weight
        if self.keeps:
            self.last = self.first.weight
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_weights_are_tied_in_the_forward_pass(mesh: str) -> None:
    model = Tied(keeps=False).double()
    report = autopar.verify(model, mesh, loss_fn=lambda model, x: model(x).square().mean(), batch=X)
    assert report.ok, report
    assert model.second.weight is model.first.weight


def test_what_a_forward_pass_keeps_is_no_parameter_of_the_model() -> None:
    model = Tied(keeps=True).double()
    made = autopar.compile(model, "dp=2", loss_fn=lambda model, x: model(x).square().mean(), batch=X)
    assert [entry.name for _, entry in made.program.parameters()] == ["first.weight", "first.bias", "second.bias"]
    assert "last" not in dict(model.named_parameters())
