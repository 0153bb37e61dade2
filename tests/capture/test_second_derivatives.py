"""Gradients of a step's own that are differentiated once more: MAML, gradient penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopar
from autopar.errors import CaptureError

Loss = Callable[[Tensor, Tensor], Tensor]
ROWS, WORDS, LENGTH = 12, 11, 6
MESHES = ["dp=3", "tp=2", "dp=2,tp=2"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh())


class Words(nn.Module):
    """padding: a word whose vector is not trained."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.words, self.down = nn.Embedding(WORDS, 8, padding_idx=padding), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.words(x).tanh()).flatten(0, 1)


class Attending(nn.Module):
    """heads: of keys and values; four of queries share them."""

    def __init__(self, attend: Callable[..., Tensor], heads: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 2 * heads), nn.Linear(8, 2 * heads)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        of = ((self.q, 4), (self.k, self.heads), (self.v, self.heads))
        q, k, v = (made(x).unflatten(2, (heads, 2)).transpose(1, 2) for made, heads in of)
        return self.out(self.attend(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smoothing=0.1)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, torch.linspace(0.5, 2, WORDS, dtype=out.dtype), label_smoothing=0.1)


def ignoring(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.where(y == 2, -100, y))


def negative(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(out.log_softmax(-1), y)


def probable(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, F.one_hot(y, WORDS).to(out.dtype) * 0.9 + 0.1 / WORDS)


def maml(loss: Loss) -> Callable[..., Tensor]:
    """A step within the step, and the loss of the weights behind it (arXiv 1703.03400)."""

    def outer(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        half, weights = len(x) // 2, dict(model.named_parameters())
        inner = loss(functional_call(model, weights, (x[:half],)), y[:half].flatten())
        found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weight - 0.4 * g for (name, weight), g in zip(weights.items(), found, strict=True)}
        return loss(functional_call(model, fast, (x[half:],)), y[half:].flatten())

    return outer


def penalty(loss: Loss) -> Callable[..., Tensor]:
    """The norms of the gradients of all weights beside the loss."""

    def whole(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x), y.flatten())
        found = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + 0.1 * torch.stack([g.square().sum() for g in found]).sum()

    return whole


def of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    """Of the kernels of torch one alone has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        x = x.detach().requires_grad_()
        value = model(x).square().mean()
        (found,) = torch.autograd.grad(value, x, create_graph=True)
        return value + found.square().sum()


def checked(model: nn.Module, mesh: str, loss: Callable[..., Tensor], batch: Any, **options: Any) -> None:
    report = autopar.verify(model.double(), mesh, loss_fn=loss, batch=batch, **options)
    assert report.ok and report.max_error < 1e-9, str(report)


@pytest.mark.parametrize("of", [maml, penalty])
@pytest.mark.parametrize(
    ("loss", "mesh"),
    [(F.cross_entropy, "dp=3"), (F.cross_entropy, "tp=2"), (smoothed, "dp=2,tp=2"), (weighted, "tp=2"),
     (ignoring, "dp=2"), (negative, "dp=2,tp=2"), (probable, "tp=2")],
)  # fmt: skip
def test_through_batch_norm_and_losses_of_classes(loss: Loss, mesh: str, of: Callable[[Loss], Any]) -> None:
    torch.manual_seed(0)
    checked(Net(), mesh, of(loss), (torch.randn(ROWS, 8), torch.randint(0, WORDS, (ROWS,))), zero=3 * (mesh == "dp=3"))


@pytest.mark.parametrize("of", [maml, penalty])
@pytest.mark.parametrize(("padding", "mesh"), [(None, "dp=3"), (3, "tp=2"), (3, "dp=2,tp=2")])
def test_through_an_embedding(padding: int | None, mesh: str, of: Callable[[Loss], Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, WORDS, (2, ROWS, 4))
    checked(Words(padding), mesh, of(F.cross_entropy), (x, y))


def near() -> Tensor:
    places = torch.arange(LENGTH)
    return (places[:, None] - places).abs() < 3


def with_no_key(places: Tensor) -> Tensor:
    return places & (torch.arange(LENGTH) != 2)[:, None]


def each_head(q: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 4 * LENGTH**2, dtype=q.dtype).view(4, LENGTH, LENGTH)


MASK = near()
ATTENDING: dict[str, Callable[..., Tensor]] = {
    "all": lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, scale=0.3, **kw),
    "causal": lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, is_causal=True, **kw),
    "a constant": lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, MASK, **kw),
    "an empty row": lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, with_no_key(near()), **kw),
    "by head": lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, each_head(q), **kw),
    "infinite": lambda q, k, v, **kw: F.scaled_dot_product_attention(
        q, k, v, torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(~near(), -torch.inf), **kw
    ),
}


@pytest.mark.parametrize(("name", "heads"), [(name, 4 - 2 * (i % 2)) for i, name in enumerate(ATTENDING)])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_through_attention(mesh: str, name: str, heads: int) -> None:
    torch.manual_seed(0)
    checked(Attending(ATTENDING[name], heads), mesh, of_inputs, torch.randn(4, LENGTH, 8))


def test_what_has_none_is_refused() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **options)

    with pytest.raises(CaptureError, match="create_graph=True that goes through attention, whose second derivative"):
        autopar.verify(Attending(dropped, 4).double(), "dp=2", loss_fn=of_inputs, batch=torch.randn(4, LENGTH, 8))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_an_index_of_nothing_is_all(mesh: str) -> None:
    """Red before: "not enough values to unpack"."""

    class All(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x[()]).clone()
            y[()] = y * 2
            return y * y.sum()[()]

    checked(All(4, 4), mesh, lambda model, x: model(x).square().mean(), torch.randn(4, 4))
