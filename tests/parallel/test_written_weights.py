"""Parameters that a step itself writes: momentum encoders, weights that are kept short, codebooks, teachers."""

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
from autopar.errors import CaptureError

pytestmark = pytest.mark.gloo


def _random(at: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)


class Momentum(nn.Module):
    """A net that is trained to agree with the mean of its own past (MoCo, arXiv 1911.05722; BYOL, 2006.07733)."""

    def __init__(self, way: str = "mul_", is_late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.way, self.is_late = way, is_late
        with torch.no_grad():
            for parameter in self.slow.parameters():
                parameter.mul_(0.7)

    @torch.no_grad()
    def _update(self) -> None:
        if self.way == "foreach":
            torch._foreach_lerp_(list(self.slow.parameters()), list(self.fast.parameters()), 0.1)
            return
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            if self.way == "data":
                slow.data = slow.data * 0.9 + fast.data * 0.1
            elif self.way == "data.mul_":
                slow.data.mul_(0.9).add_(0.1 * fast.detach().data)
            elif self.way == "copy_":
                slow.copy_(0.9 * slow + 0.1 * fast)
            else:
                slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and not self.is_late:
            self._update()
        with torch.no_grad():
            wanted = self.slow(y)
        loss = F.mse_loss(self.fast(x), wanted)
        if self.training and self.is_late:
            self._update()
        return loss


class Short(nn.Module):
    """Trained weights that each step makes shorter before it uses them (EEGNet, arXiv 1611.08024), or after."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.way = nn.Linear(6, 12), nn.Linear(12, 6), way
        self.register_buffer("mask", torch.rand(12, 6) > 0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "renorm":
                self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.4)
            elif self.way == "normed":
                self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
            else:
                self.up.weight.data.mul_(self.mask)
        loss = F.mse_loss(self.down(torch.relu(self.up(x))), y)
        self.down.bias.data.clamp_(-0.1, 0.1)
        return loss


class Codes(nn.Module):
    """A codebook that follows the mean of what is nearest to each code, of the whole batch (arXiv 1711.00937, A.1)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.back = nn.Linear(6, 4), nn.Linear(4, 6)
        self.codes = nn.Parameter(torch.randn(9, 4), requires_grad=False)
        self.register_buffer("counts", torch.ones(9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.into(x)
        with torch.no_grad():
            nearest = (h.unsqueeze(1) - self.codes).square().sum(-1).argmin(1)
            chosen = F.one_hot(nearest, 9).to(h.dtype)
            self.counts.data.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.codes.data.copy_(0.9 * self.codes + 0.1 * (chosen.T @ h) / self.counts.unsqueeze(1))
        code = self.codes[nearest]
        return F.mse_loss(self.back(h + (code - h).detach()), y) + F.mse_loss(h, code)


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("dp=2,tp=3", {}),
    ("fsdp=4", {}),  # which does not divide six rows
    ("fsdp=2,tp=2", {"zero": 2}),
    ("pp=2,dp=2", {"microbatches": 2}),
    ("pp=2,fsdp=2", {"microbatches": 3, "schedule": "zb-h1"}),
    ("fsdp=2", {"offload": "parameters"}),
    ("dp=2", {"microbatches": 3, "recompute": "full"}),
    ("fsdp=2", {"precision": "bf16", "reduce_dtype": torch.float32}),
]


def _batch() -> tuple[Tensor, Tensor]:
    return _random(1, 12, 6).float(), _random(2, 12, 6).float()


@pytest.mark.parametrize(("mesh", "options"), MESHES)
@pytest.mark.parametrize("make", [Momentum, lambda: Momentum("data", True), lambda: Short("renorm")])
def test_what_a_step_writes_is_there_behind_it(
    make: Callable[[], nn.Module], mesh: str, options: dict[str, Any]
) -> None:
    report = autopar.verify(make(), mesh, batch=_batch(), steps=3, **options)
    assert report.ok, report


WAYS: list[Callable[[], nn.Module]] = [
    lambda: Momentum("foreach"),
    lambda: Momentum("copy_"),
    lambda: Momentum("data.mul_", True),
    lambda: Short("normed"),
    lambda: Short("masked"),
    Codes,
]


@pytest.mark.parametrize("make", WAYS)
def test_each_way_to_write(make: Callable[[], nn.Module]) -> None:
    report = autopar.verify(make(), "fsdp=2,tp=2", batch=_batch(), steps=3)
    assert report.ok, report


def test_each_place_of_ddp_writes_the_same() -> None:
    report = autopar.verify(Momentum(), "dp=2", batch=[_batch(), _batch()], ddp=True, steps=2)
    assert report.ok, report


def _plain_step(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    return loss.detach()


def _trained(make: Callable[[], nn.Module], mesh: str, options: dict[str, Any]) -> list[Tensor]:
    """Losses of steps and evaluations, and all that the state dict holds; of the plain module without a mesh."""
    model: Any = make().double()
    if mesh:
        model = autopar.parallelize(model, mesh, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = list[Tensor]()
    for at in range(4):
        x, y = _random(at, 12, 6), _random(at + 9, 12, 6)
        found += [model.forward_backward(x, y) if mesh else _plain_step(model, x, y)]
        if at % 2:  # gradients of two steps add up, and each of the two writes
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += [model(x, y)]
        model.train()
    state = nn.Module.state_dict(model)
    return found + [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state.values()]


def _differing(rank: int, mesh: str, options: dict[str, Any]) -> list[str]:
    wrong = []
    for name, make in {"momentum": lambda: Momentum("data"), "late": lambda: Momentum("foreach", True),
                       "short": lambda: Short("renorm"), "masked": lambda: Short("masked")}.items():  # fmt: skip
        sides = _trained(make, "", {}), _trained(make, mesh, options)
        if not all(torch.allclose(a.double(), b.double(), atol=1e-12) for a, b in zip(*sides, strict=True)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2", {}), ("tp=2", {}), ("fsdp=2", {}), ("pp=2", {"microbatches": 2})]
)
def test_training_on_ranks(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    assert two.run(_differing, mesh, options) == [[], []]


def _forwards(rank: int) -> list[Tensor]:
    """Forward passes in training mode write on the stage of the momentum net alone: no change of the user's."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), _Follows()).double()
    model = autopar.parallelize(net, "pp=2", loss_fn=lambda m, x, y: F.mse_loss(m(x), y), microbatches=2)
    batch = _random(1, 12, 6), _random(2, 12, 6)
    losses = [model.forward_backward(*batch)]
    for _ in range(2):
        model(batch[0])
        losses.append(model.forward_backward(*batch))
    return losses


class _Follows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.lerp_(self.fast.weight, 0.1)
        return self.fast(x) - self.slow(x)


def test_forward_passes_that_write_on_one_stage(two: Ranks) -> None:
    first, second = two.run(_forwards)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def _with_teacher(mesh: str) -> list[Tensor]:
    """A loss that moves a plain teacher, which stands outside of the model, before it asks it."""
    student: Any = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double()
    teacher = copy.deepcopy(student).requires_grad_(False)
    for at, parameter in enumerate([*student.parameters(), *teacher.parameters()]):
        parameter.data = 0.3 * _random(at, *parameter.shape)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            wanted = teacher(y)
        return F.mse_loss(model(x), wanted)

    step: Callable[..., Tensor] = lambda x, y: _plain_step(loss_fn_module, x, y)  # noqa: E731
    loss_fn_module = _Called(student, loss_fn)
    if mesh:
        student = autopar.parallelize(student, mesh, loss_fn=loss_fn)
        step = student.forward_backward
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for at in range(3):
        losses.append(step(_random(at, 12, 6), _random(at + 9, 12, 6)))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach().clone() for parameter in teacher.parameters())]


class _Called(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss_fn(self.model, *batch)


def _teachers(rank: int, mesh: str) -> bool:
    pairs = zip(_with_teacher(""), _with_teacher(mesh), strict=True)
    return all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_a_teacher_in_the_loss(two: Ranks, mesh: str) -> None:
    assert two.run(_teachers, mesh) == [True, True]


OUTSIDE = torch.ones(6)


def test_a_capture_changes_nothing_of_the_users() -> None:
    """The write is refused, and has not been made."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        OUTSIDE.mul_(0.5)
        torch._foreach_mul_([OUTSIDE], 0.5)
        return ((model(x) - y) * OUTSIDE).square().mean()

    batch = tuple(each.float() for each in _batch())
    with pytest.raises(CaptureError, match="a write to a tensor from outside of the model"):
        autopar.compile(nn.Linear(6, 6), "dp=2", loss_fn=loss_fn, batch=batch)
    assert OUTSIDE.equal(torch.ones(6))


def test_a_table_made_of_what_a_step_writes_is_not_kept() -> None:
    """A frozen parameter that no step writes may be behind a table that the first step makes; this one is written."""

    class Cached(Momentum):
        table: Tensor | None = None

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.table is None:
                self.table = self.slow[0].weight.detach() * 2
            return super().forward(x, y) + self.table.square().sum()

    with pytest.raises(CaptureError, match="table"):
        autopar.compile(Cached(), "dp=2", batch=_batch())
