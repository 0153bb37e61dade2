"""Copies of a parallel model's parameters, and what was computed of them, that a loss or a model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import ranks_of
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

pytestmark = pytest.mark.gloo
STEPS = 4


class Net(nn.Module):
    """`kept`: what a script puts there."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight if self.kept is None else (self.up.weight + self.kept) / 2
        return self.down(torch.tanh(F.linear(x, weight, self.up.bias)))


@dataclass
class Script:
    """A loop: what its loss reads beside the batch, and what it does behind each step."""

    between: Callable[[Any, Any, dict[str, Any]], None]
    penalty: Callable[[nn.Module, dict[str, Any]], Any]
    held: dict[str, Any] = field(default_factory=dict)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        return loss + self.penalty(model, self.held) if self.held else loss


def elastic(model: nn.Module, held: dict[str, Any]) -> Any:
    """Elastic weight consolidation (Kirkpatrick et al. 2017): weights are drawn to some of before."""
    return sum((p - held[name]).square().sum() for name, p in model.named_parameters())


def keep_once(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    for name, p in model.named_parameters():
        held.setdefault(name, p.detach().clone())


def follow_in_place(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    keep_once(model, optimizer, held)
    for name, p in model.named_parameters():
        held[name].mul_(0.5).add_(p.detach(), alpha=0.5)


def follow_by_list(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    keep_once(model, optimizer, held)
    torch._foreach_lerp_(list(held.values()), [p.detach() for p in model.parameters()], 0.25)


def bind_anew(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    held.update({name: 1.5 * p.detach() for name, p in model.named_parameters()})


def exchange_data(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    keep_once(model, optimizer, held)
    for name, p in model.named_parameters():
        held[name].data = 0.5 * p.detach()


def weigh_by_norms(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    """GradNorm's kind of weights: numbers of gradients, as tensors."""
    norms = torch.stack([p.detach().norm() for p in model.parameters()])
    held["weights"] = norms / norms.sum()


def weighted(model: nn.Module, held: dict[str, Any]) -> Any:
    return sum(w * p.square().sum() for w, p in zip(held["weights"], model.parameters(), strict=True))


def keep_momenta(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    held.update({name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()})


def keep_views(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    held["rows"], held["turned"] = model.up.weight.detach()[2:8], model.down.weight.detach().clone().t()


def of_views(model: Any, held: dict[str, Any]) -> Any:
    return (model.up.weight[2:8] * held["rows"]).sum() + (held["turned"] @ model.down.bias).square().sum()


def asked_whole(model: nn.Module, held: dict[str, Any]) -> Any:
    values = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in held.items()}
    return elastic(model, values)


def under_a_branch(model: Any, held: dict[str, Any]) -> Any:
    return 2 * elastic(model, held) if held["up.weight"].norm() > 2.4 else elastic(model, held)


def keep_as_attribute(model: Any, optimizer: Any, held: dict[str, Any]) -> None:
    if model.kept is None:
        model.kept = model.up.weight.detach().clone()
    else:
        model.kept.mul_(0.5)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "kept once": lambda: Script(keep_once, elastic),
    "written in place": lambda: Script(follow_in_place, elastic),
    "written as a list": lambda: Script(follow_by_list, elastic),
    "bound anew": lambda: Script(bind_anew, elastic),
    "other data": lambda: Script(exchange_data, elastic),
    "norms": lambda: Script(weigh_by_norms, weighted),
    "momenta": lambda: Script(keep_momenta, elastic),
    "views": lambda: Script(keep_views, of_views),
    "full_tensor in the loss": lambda: Script(bind_anew, asked_whole),
    "a branch on one": lambda: Script(follow_in_place, under_a_branch),
    "an attribute of the model": lambda: Script(keep_as_attribute, elastic),
}

# Where a copy lies as its parameter does all scripts run. With micro-batches, stages or two axes run those whose
# values are spread in a way of their own there; each runs on one of these meshes at least.
SPREAD: dict[str, tuple[str, ...]] = {
    "dp=2": tuple(SCRIPTS),
    "tp=2": tuple(SCRIPTS),
    "fsdp=2": ("written as a list", "bound anew", "other data", "views", "an attribute of the model"),
    "pp=2": ("kept once", "norms", "momenta", "a branch on one", "an attribute of the model"),
    "dp=2,tp=3": ("written in place", "norms", "momenta", "views", "full_tensor in the loss"),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator).double(), torch.randn(12, 6, generator=generator).double()


def trained(script: Script, mesh: str, options: dict[str, Any]) -> list[Tensor]:
    """The losses of a loop, an evaluation behind each step, and the weights. mesh: "" of the plain module."""
    torch.manual_seed(3)
    model: Any = Net().double()
    if mesh:
        model = autopar.parallelize(model, mesh, loss_fn=script.loss, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS):
        if mesh:
            loss = model.forward_backward(*batch(step))
        else:
            (loss := script.loss(model, *batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        script.between(model, optimizer, script.held)
        with torch.no_grad():
            found += [loss.detach(), model(batch(9)[0])]
    weights = [p.detach() for p in model.parameters()]
    return [*found, *(weight.full_tensor() if mesh else weight for weight in weights)]


def scripts_of(rank: int, mesh: str, options: dict[str, Any]) -> None:
    for name in SPREAD[mesh]:
        script = SCRIPTS[name]
        made, wanted = trained(script(), mesh, options), trained(script(), "", {})
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {}),
        ("tp=2", {}),
        ("fsdp=2", {"microbatches": 3}),
        ("pp=2", {"microbatches": 2}),
    ],
    ids=str,
)
def test_a_step_is_that_of_one_device(mesh: str, options: dict[str, Any]) -> None:
    with ranks_of(2) as two:
        two.run(scripts_of, mesh, options, timeout=240)


def test_a_step_on_a_mesh_of_unlike_axes() -> None:
    with ranks_of(6) as six:
        six.run(scripts_of, "dp=2,tp=3", {"zero": 3}, timeout=240)


def _refused(rank: int) -> None:
    model: Any = autopar.parallelize(Net(), "dp=2", loss_fn=(script := Script(bind_anew, elastic)).loss)
    x, y = (tensor.float() for tensor in batch(0))
    model.forward_backward(x, y)
    script.held["up.weight"] = nn.Parameter(model.up.weight.detach().clone())
    script.penalty = lambda model, held: (model.up.weight - held["up.weight"]).square().sum()
    with pytest.raises(CaptureError, match=r"test_copies_in_loss_gloo.py:\d+[^$]*requires a gradient and is no param"):
        model.forward_backward(x, y)
    script.held["up.weight"] = model.up.weight.detach().clone()
    script.penalty = lambda model, held: (model.up.weight - held["up.weight"].to_local()).square().sum()
    with pytest.raises(CaptureError, match=r"a rank's part of a tensor \(to_local\(\)\)"):
        model.forward_backward(x, y)


def test_what_would_be_wrong_is_refused_with_its_line() -> None:
    with ranks_of(2) as two:
        two.run(_refused)


def _differs(rank: int, change: str) -> None:
    model: Any = autopar.parallelize(Net(), "dp=2", loss_fn=(script := Script(bind_anew, elastic)).loss)
    x, y = (tensor.float() for tensor in batch(0))
    model.forward_backward(x, y)
    bind_anew(model, None, script.held)
    model.forward_backward(x, y)
    if rank and change == "written":
        script.held["up.bias"].add_(1)
    elif rank:
        script.held["up.bias"] = script.held["down.bias"]
    model.forward_backward(x, y)


@pytest.mark.parametrize("change", ["written", "bound"])
def test_a_change_on_one_rank_is_told(change: str) -> None:
    with ranks_of(2) as two:
        for outcome in two.attempt(_differs, change):
            assert outcome.error is not None and outcome.error.startswith("RankError"), outcome
            assert "up.bias" in outcome.error, outcome.error
