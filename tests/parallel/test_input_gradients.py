"""Gradients of what a step is given: of tensors of its batch that require one, and of what those were computed from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mix, self.down = nn.Linear(width, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mix(F.gelu(self.up(x)))))


class Prompted(Net):
    """Trained vectors in front of a sequence."""

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([prompt.expand(len(x), -1, -1), x], 1)).mean(1)


def _random(at: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)


def _labels(at: int, rows: int = 12) -> Tensor:
    return torch.randint(4, (rows,), generator=torch.Generator().manual_seed(at))


def plain(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


def coupled(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(m(x))
    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z))) + plain(m, x, y)


def penalty(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return plain(m, x, y) + g.square().sum(-1).mean()


def cut(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Samples that meet their gradients in another place than they came from."""
    return F.cross_entropy(m(x[:6]) - m(x[6:]).flip(1), y[:6])


def prompted(m: nn.Module, x: Tensor, y: Tensor, prompt: Tensor) -> Tensor:
    return F.cross_entropy(m(x, prompt), y)


LOSSES = {loss.__name__: loss for loss in (plain, coupled, penalty, cut)}
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2,tp=3", {}), ("dp=3", {"zero": 3, "microbatches": 2}), ("pp=2", {"microbatches": 3}),
    ("pp=2,dp=2", {"microbatches": 3, "recompute": "full"}), ("dp=3,pp=2", {"precision": "fp16", "microbatches": 2}),
)  # fmt: skip


def _asked(report: Any) -> list[str]:
    return [row.name for row in report.rows if row.kind == "input_gradient"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_they_are_those_of_one_device(mesh: str, options: dict[str, Any], loss: str) -> None:
    batch = _random(0, 12, 6).float().requires_grad_(), _labels(0)
    report = autopar.verify(Net(), mesh, loss_fn=LOSSES[loss], batch=batch, steps=1, **options)
    assert report.ok and _asked(report) == ["0"] and batch[0].grad is None, report


def asking(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return penalty(m, x.requires_grad_(), y)


@pytest.mark.parametrize(("mesh", "options"), MESHES[::2])
def test_a_step_asks_for_them_itself(mesh: str, options: dict[str, Any]) -> None:
    batch = _random(0, 12, 6).float(), _labels(0)
    report = autopar.verify(Net(), mesh, loss_fn=asking, batch=batch, steps=2, **options)
    assert report.ok and _asked(report) == ["0"] and not batch[0].requires_grad, report


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("cp=3,tp=2", {}), ("dp=2", {"microbatches": 2}), ("pp=2", {"schedule": "zb-h1", "microbatches": 2})],
)
def test_what_all_samples_share_has_the_sum(mesh: str, options: dict[str, Any]) -> None:
    batch = _random(0, 12, 6, 6).requires_grad_(), _labels(0), _random(1, 1, 3, 6).requires_grad_()
    report = autopar.verify(Prompted(), mesh, loss_fn=prompted, batch=batch, steps=1, **options)
    assert report.ok and _asked(report) == ["0", "2"], report


def test_each_place_of_ddp_has_those_of_its_own_loss() -> None:
    batches = tuple((_random(at, 4 + at, 6).requires_grad_(), _labels(at, 4 + at)) for at in range(2))
    report = autopar.verify(Net(), "dp=2", loss_fn=plain, batch=list(batches), ddp=True, steps=1)
    assert report.ok and _asked(report) == ["0", "0 of place 1"], report


def _adversarial(model: Any, optimizer: Any, at: int) -> list[Tensor]:
    x = _random(at, 12, 6).requires_grad_()
    loss = model.training_loss(x, _labels(at))
    (3 * loss).backward()
    assert x.grad is not None
    optimizer.zero_grad()
    model.training_loss((x + 0.1 * x.grad.sign()).detach(), _labels(at)).backward()
    return [loss, x.grad]


def _in_front(model: Any, optimizer: Any, at: int) -> list[Tensor]:
    """A net of the user's own, which autopar knows nothing of, on both kinds of step."""
    torch.manual_seed(at)
    front = nn.Linear(3, 6).double()
    losses = [model.forward_backward(torch.tanh(front(_random(at, 12, 3))), _labels(at))]
    losses += [model.training_loss(front(_random(at + 1, 12, 3)), _labels(at)) / 2]
    losses[1].backward()
    return [*losses, *(p.grad for p in front.parameters() if p.grad is not None)]


def _of_the_batch_alone(model: Any, optimizer: Any, at: int) -> list[Tensor]:
    """A loss that is asked for the gradient of the batch adds none to parameters, and can still be."""
    x = _random(at, 12, 6).requires_grad_()
    loss = model.training_loss(x, _labels(at))
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert all(p.grad is None for p in model.parameters()) and x.grad is None
    loss.backward()
    return [loss, gradient, x.grad] if x.grad is not None else []


def _now_and_then(model: Any, optimizer: Any, at: int) -> list[Tensor]:
    """The same shapes with and without, and one of which the loss takes nothing."""
    x = _random(at, 12, 6).requires_grad_(at % 2 == 0)
    loss = model.training_loss(x, _labels(at))
    loss.backward()
    return [loss] if x.grad is None else [loss, x.grad]


LOOPS: dict[str, Callable[[Any, Any, int], list[Tensor]]] = {
    loop.__name__: loop for loop in (_adversarial, _in_front, _of_the_batch_alone, _now_and_then)
}


def _as_plain(model: Any) -> Any:
    def step(*batch: Tensor) -> Tensor:
        loss = plain(model, *batch)
        loss.backward()
        return loss.detach()

    object.__setattr__(model, "training_loss", lambda *batch: plain(model, *batch))
    object.__setattr__(model, "forward_backward", step)
    return model


def _looped(rank: int, mesh: str, options: dict[str, Any]) -> list[str]:
    """The names of loops that end otherwise than those of the plain module."""
    wrong = []
    for name, loop in LOOPS.items():
        module = Net().double()
        sides = _as_plain(copy.deepcopy(module)), autopar.parallelize(module, mesh, loss_fn=plain, **options)
        found = []
        for model in sides:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            values: list[Tensor] = []
            for at in range(3):
                optimizer.zero_grad()
                values += loop(model, optimizer, at)
                optimizer.step()
            values += [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            found.append(values)
        alike = [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found, strict=True)]
        wrong += [] if all(alike) else [f"{name} {alike}"]
    return wrong


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2", {}), ("tp=2", {}), ("fsdp=2", {}), ("pp=2", {"microbatches": 2})]
)
def test_loops_of_users(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    assert two.run(_looped, mesh, options) == [[], []]


def _of_parts(rank: int) -> bool:
    """Whether each rank has the rows of its own part, of unlike sizes."""
    whole, first = _random(0, 12, 6), 5
    x = whole.clone().requires_grad_()
    plain(Net().double(), x, _labels(0)).backward()
    assert x.grad is not None
    rows = slice(0, first) if rank == 0 else slice(first, 12)
    own = whole[rows].clone().requires_grad_()
    model = autopar.parallelize(Net().double(), "dp=2", loss_fn=plain, batch="local")
    model.forward_backward(own, _labels(0)[rows])
    return own.grad is not None and torch.allclose(own.grad, x.grad[rows], rtol=1e-12, atol=1e-12)


def test_ranks_with_parts_have_their_rows(two: Ranks) -> None:
    assert two.run(_of_parts) == [True, True]


def _unlike(rank: int) -> None:
    model = autopar.parallelize(Net().double(), "dp=2", loss_fn=plain)
    model.forward_backward(_random(0, 12, 6).requires_grad_(rank == 1), _labels(0))


def test_ranks_that_ask_for_unlike_ones_are_told(two: Ranks) -> None:
    errors = [outcome.error or "" for outcome in two.attempt(_unlike)]
    assert all(error.startswith("RankError") and "argument 0 gets a gradient" in error for error in errors), errors


def test_a_second_backward_pass_is_refused() -> None:
    model, x = autopar.parallelize(Net().double(), "dp=1", loss_fn=plain), _random(0, 12, 6).requires_grad_()
    loss = model.training_loss(x, _labels(0))
    loss.backward(retain_graph=True)
    with pytest.raises(AutoparError, match="for the second time"):
        loss.backward()


class Forces(Net):
    """An energy with its forces, as models of molecules have them, in training and behind it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        energy = super().forward(x.requires_grad_()).square().sum(1)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -gradient, torch.is_grad_enabled()


def _fit(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    energy, forces, _ = m(x)
    return (energy - y).square().mean() + (forces - 1).square().mean()


def _with_forces(rank: int, mesh: str) -> list[bool]:
    plain_side = Forces().double()
    model = autopar.parallelize(Forces().double(), mesh, loss_fn=_fit)
    alike, sides = [], (plain_side, model)
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.01) for side in sides]
    for at in range(3):
        x, y = _random(at, 12, 6), _labels(at)
        _fit(plain_side, own := x.clone(), y).backward()
        model.training_loss(x, y).backward() if at == 1 else model.forward_backward(x, y)
        alike.append(x.requires_grad and torch.allclose(x.grad, own.grad, rtol=1e-12, atol=1e-12))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [side.eval()(_random(5, 12, 6)) for side in sides]
    alike += [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found[0][:2], found[1][:2], strict=True)]
    with torch.no_grad(), pytest.raises(AutoparError, match="does not require grad"):
        model(_random(5, 12, 6))
    return [*alike, found[1][2]]


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_model_that_has_forces_has_them_in_evaluation(two: Ranks, mesh: str) -> None:
    assert two.run(_with_forces, mesh) == [[True] * 6] * 2


class Modes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 3)


def test_a_forward_has_gradients_on_or_off_as_its_caller_has() -> None:
    model, other = autopar.parallelize(Modes().double(), "dp=1", loss_fn=plain), Modes().double()
    x = _random(0, 12, 6)
    for _ in range(2):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(model(x), other(x), rtol=1e-12, atol=1e-12), mode
    assert len(model.programs) == 2


class Asks(nn.Module):
    """Computes something else where a weight or the input requires a gradient, as adapters that are merged do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * (2 if self.up.weight.requires_grad else 1) * (3 if x.requires_grad else 1)


def test_what_requires_a_gradient_says_so_with_gradients_off() -> None:
    """Red where a forward under `torch.no_grad()` was that of a frozen model."""
    other = Asks().double()
    model = autopar.parallelize(copy.deepcopy(other), "dp=1")
    for is_trained in (True, False):
        model.requires_grad_(is_trained)
        other.requires_grad_(is_trained)
        for x in (_random(0, 12, 6), _random(0, 12, 6).requires_grad_()):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    assert torch.allclose(model(x), other(x), rtol=1e-12, atol=1e-12), (is_trained, mode)
