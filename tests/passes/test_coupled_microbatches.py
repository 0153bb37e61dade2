"""Losses and values that take samples together, with micro-batches: what all forward passes add up to is whole before
the first backward pass."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.capture import capture
from autopar.capture.step_kind import StepKind
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.errors import CoupledError, ScheduleError
from autopar.ir.mesh import parse_mesh
from autopar.parallel.weights.owners import as_trained

F64 = torch.float64
X = torch.randn(12, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
Loss = Callable[..., Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.image, self.text = nn.Linear(6, 5).double(), nn.Linear(4, 5).double()
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=F64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, q = F.normalize(self.image(x).tanh(), dim=-1), F.normalize(self.text(y).tanh(), dim=-1)
        return p @ q.T * self.scale.exp()


class Placed(nn.Module):
    """A network gives each place its bias, as in continuous position biases: its gradient is small where it begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)
        self.places = nn.Sequential(*layers).double()
        self.read, self.out = nn.Linear(1, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(6, dtype=F64)
        h = self.read(x[:, :, None]) + self.places(torch.stack([place, place.square() / 6], -1) / 6)
        return self.out(h.tanh()).mean(1)


def balance(model: nn.Module, x: Tensor) -> Tensor:
    """As a mixture's router: the share of tokens that each expert has, times its mean probability."""
    h = model(x)
    p = h.softmax(-1)
    share = F.one_hot(p.argmax(-1), 4).double().mean(0)
    return h.square().mean() + 0.4 * (share * p.mean(0)).sum()


def dice(model: nn.Module, x: Tensor) -> Tensor:
    p, t = model(x).sigmoid(), (x[:, :4] > 0).double()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def variance(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return (h - h.mean(0)).square().mean() + h.std(0).log().sum()


def covariance(model: nn.Module, x: Tensor) -> Tensor:
    """VICReg's (arXiv 2105.04906, equation 4)."""
    h = model(x)
    h = h - h.mean(0)
    c = h.T @ h / (len(h) - 1)
    return c.square().sum() - c.diagonal().square().sum() + h.square().mean()


def clip(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    s, labels = model(x, y), torch.arange(len(x))
    return (F.cross_entropy(s, labels) + F.cross_entropy(s.T, labels)) / 2


def simclr(model: nn.Module, x: Tensor) -> Tensor:
    z = F.normalize(torch.cat([model(x), model(x * 0.9)]), dim=-1)
    s = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    n = len(x)
    return F.cross_entropy(s, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def similar(model: nn.Module, x: Tensor) -> Tensor:
    """Of all pairs; and a penalty on a weight, which the loss reads when all micro-batches have come forward."""
    h = model(x)
    return F.cross_entropy(h @ h.T, torch.arange(len(h))) + 0.3 * model.places[2].weight.square().sum()  # type: ignore


def rank_loss(model: nn.Module, x: Tensor) -> Tensor:
    s = model(x)[:, 0]
    return F.softplus(-(s[:, None] - s[None]) * (x[:, 0][:, None] - x[:, 0][None]).sign()).mean()


LOSSES: Mapping[str, tuple[Callable[[], nn.Module], Loss, tuple[Tensor, ...]]] = {
    "balance": (Net, balance, (X,)), "dice": (Net, dice, (X,)), "variance": (Net, variance, (X,)),
    "covariance": (Net, covariance, (X,)), "clip": (Towers, clip, (X, Y)), "simclr": (Net, simclr, (X,)),
    "rank": (Net, rank_loss, (X,)), "places": (Placed, similar, (X,)),
}  # fmt: skip
WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "accumulation": ("dp=1", {"microbatches": 3}),
    "dp": ("dp=2", {"microbatches": 3}),
    "dp, tp": ("dp=2,tp=2", {"microbatches": 2, "zero": 1}),
    "pp": ("pp=2", {"microbatches": 4}),
    "pp, dp": ("pp=2,dp=2", {"microbatches": 3, "zero": 2, "schedule": "gpipe"}),
    "zero=3": ("dp=2", {"microbatches": 3, "zero": 3, "recompute": "full"}),
    "zero=3, pp": ("pp=2,dp=2", {"microbatches": 3, "zero": 3}),
}


@functools.cache
def once(name: str) -> Once:
    make, loss, batch = LOSSES[name]
    return Once.of(make(), loss, batch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_step_of_the_whole_batch(name: str, way: str) -> None:
    mesh, options = WAYS[way]
    report = once(name).report(once(name).compiled(mesh, **options))
    assert report.ok, report


class Words(nn.Module):
    """A mean over positions, which cp splits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tokens, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.tokens(x)).tanh()).mean(1)


def rolled(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample beside the one, and against the second one, before it."""
    h = model(x)
    return F.triplet_margin_loss(h, h.roll(1, 0), h.roll(2, 0))


@pytest.mark.parametrize("mesh", ["dp=2", "cp=2", "dp=2,cp=2", "dp=2,ulysses=2", "pp=2,cp=2", "fsdp=3,cp=2"])
def test_neighbours_of_a_batch_are_those_of_the_whole_batch(mesh: str) -> None:
    """With an axis of the sequence a roll is rows with their neighbours, which over dp:mb nobody could send."""
    x = torch.randint(0, 16, (12, 4), generator=torch.Generator().manual_seed(5))
    report = autopar.verify(Words().double(), mesh, loss_fn=rolled, batch=x, microbatches=2)
    assert report.ok, report


def test_the_order_is_chosen_and_its_price_told() -> None:
    made = autopar.compile(Net(), "pp=2", loss_fn=balance, batch=X, microbatches=4)
    assert made.pipeline is not None and made.pipeline.schedule == "gpipe"
    (note,) = [note for note in made.program.notes if "come forward" in note]
    assert re.match(
        r"all 4 micro-batches come forward before the first goes back \(schedule gpipe\), for op '.*' \("
        + Path(__file__).name
        + r":\d+\) needs the whole batch .* Until then a rank keeps up to [\d.]+ (B|kB) of them; with "
        r"recompute='stage' it keeps what enters a stage$",
        note,
    )
    plain = autopar.compile(Net(), "pp=2", loss_fn=lambda model, x: model(x).square().mean(), batch=X, microbatches=4)
    assert plain.pipeline is not None and plain.pipeline.schedule == "1f1b"
    assert not [note for note in plain.program.notes if "come forward" in note]


def test_a_schedule_that_goes_back_early_is_refused() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"^schedule 'zb-h1' lets micro-batches go back before all have come forward, but op '.*' \(.*\) needs "
        r"the whole batch .*\. Use schedule 'gpipe', which lets all come forward first, or microbatches=1\.$",
    ):
        autopar.compile(Net(), "pp=2", loss_fn=dice, batch=X, microbatches=4, schedule="zb-h1")


def test_similarities_are_kept_of_all_and_activations_of_one() -> None:
    """What the backward pass of a contrastive loss reads is computed once, between the passes."""
    made = autopar.compile(Towers(), "dp=1", loss_fn=clip, batch=(X, Y), microbatches=3)
    assert made.pipeline is not None
    middle, backward = made.pipeline.graphs[0, "M"], made.pipeline.graphs[0, "B"]
    assert any("logsumexp" in str(node.target) for node in middle.calls())
    assert not any("logsumexp" in str(node.target) for node in backward.calls())
    assert " ".join(map(str, made.pipeline.lists[0])) == "0P 0F0 0F1 0F2 0M 0B0 0B1 0B2 0E"


def test_what_couples_layer_after_layer_is_refused() -> None:
    """Statistics of one layer are needed before the next one can begin."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pytest.raises(CoupledError, match=r"^micro-batches cannot be computed one after another: .*takes all samples"):
        autopar.compile(model.double(), "dp=1", loss_fn=lambda m, x: m(x).square().mean(), batch=X, microbatches=3)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    out = model(z)
    (grad,) = torch.autograd.grad(out.sum(), z, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean() + out.square().mean()


def second_derivative(model: nn.Module, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    u = model(z)[:, 0]
    (du,) = torch.autograd.grad(u.sum(), z, create_graph=True)
    (d2,) = torch.autograd.grad(du[:, 0].sum(), z, create_graph=True)
    return (d2[:, 0] + u).square().mean()


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {"microbatches": 3}),
        ("pp=2,dp=2", {"microbatches": 3, "zero": 2}),
        ("pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
        ("dp=2", {"microbatches": 2, "zero": 3, "recompute": "full"}),
    ],
)
@pytest.mark.parametrize("loss", [penalty, second_derivative])
def test_a_gradient_inside_of_a_loss_is_forward(loss: Loss, mesh: str, options: dict[str, Any]) -> None:
    report = autopar.verify(Net(), mesh, loss_fn=loss, batch=(X,), **options)
    assert report.ok, report


class Keeps(nn.Module):
    """Two layers, of which each gives what it normed beside the output, in a longer dtype: a cache of latents."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer in self.layers:
            short = layer(x).float()
            x = (short * torch.rsqrt(short.square().mean(-1, keepdim=True) + 1e-6)).double()
            kept.append(x)
        return (x, *kept)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_leaves_whole_is_no_reason_to_compute_whole(microbatches: int) -> None:
    """Red before: a value was gathered before its norm, where it is shorter, since it was to leave whole anyway. Then
    each rank did the work of all, and micro-batches were refused."""
    captured = capture(Keeps(), None, (X[:8],), {}, kind=StepKind.OUTPUT)
    program = lower(as_trained(captured), parse_mesh("dp=2"), options_of(microbatches=microbatches))
    gathered = [one.dtype for one in program.collectives if one.op == "all_gather"]
    assert gathered == [F64] * 3


class Standardised(nn.Conv2d):
    """A convolution whose weights are standardised in each step (weight standardisation, arXiv 1903.10520), as timm
    spells it."""

    def __init__(self, into: int, out: int, size: int = 1) -> None:
        super().__init__(into, out, size, padding=size // 2, dtype=F64)
        self.gain = nn.Parameter(1 + torch.rand(out, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, weight=self.gain * 0.3, training=True, momentum=0.0)
        return F.conv2d(x, rows.reshape_as(self.weight), self.bias, self.stride, self.padding)


class Residual(nn.Module):
    """A bottleneck of such convolutions, whose wide ones have sums over weights that cost less whole than in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = Standardised(3, 2048), Standardised(2048, 32), Standardised(32, 2048)
        self.inner = Standardised(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.up(torch.tanh(self.inner(torch.tanh(self.down(torch.tanh(x))))))


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2", {"microbatches": 2}), ("pp=2,dp=2", {"microbatches": 3}), ("dp=3", {"zero": 3})]
)
def test_norms_of_weights_in_many_layers(mesh: str, options: dict[str, Any]) -> None:
    """Red before: each search for layouts made one sum of one layer's whole, and after eight micro-batches were
    refused."""
    images = torch.randn(12, 3, 1, 1, dtype=F64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    options = {"microbatches": 2, **options}
    assert autopar.verify(Residual(), mesh, loss_fn=lambda m, x: m(x).square().mean(), batch=(images,), **options).ok
