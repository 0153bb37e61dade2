"""Samples that a loss cuts out of the batch before the model sees them: each rank, each micro-batch has its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from verified import Once

import autopar
from autopar.errors import CoupledError, LayoutError

ROWS = 24


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 8, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)


def halves(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = x.chunk(2)
    return F.mse_loss(m(a), m(b).detach())


def triplets(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(*(m(part) for part in x.split(ROWS // 3)))


def views(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = x.view(2, -1, 8)
    return F.mse_loss(m(a), m(b)) + F.mse_loss(m(x), y)


def interleaved(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    pairs = x.view(2, -1, 8).transpose(0, 1)
    return F.mse_loss(m(pairs[:, 0]), m(pairs[:, 1]))


def adapted(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML (arXiv 1703.03400): weights of a step on the support, the loss of the query."""
    weights, half = dict(m.named_parameters()), ROWS // 2
    loss = F.mse_loss(functional_call(m, weights, (x[:half],)), y[:half])
    moved = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    stepped = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), moved, strict=True)}
    return F.mse_loss(functional_call(m, stepped, (x[half:],)), y[half:])


def adapted_by_func(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights, half = dict(m.named_parameters()), ROWS // 2
    moved = grad(lambda w: F.mse_loss(functional_call(m, w, (x[:half],)), y[:half]))(weights)
    stepped = {name: w - 0.1 * moved[name] for name, w in weights.items()}
    return F.mse_loss(functional_call(m, stepped, (x[half:],)), y[half:])


def labelled_and_not(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """FixMatch (arXiv 2001.07685): a third has labels, the others are two views of one another."""
    labelled, weak, strong = x[:8], x[8:16], x[16:]
    with torch.no_grad():
        sure, guessed = m(weak).softmax(-1).max(-1)
    unsure = F.cross_entropy(m(strong), guessed, reduction="none") * (sure > 0.3)
    return F.mse_loss(m(labelled), y[:8]) + unsure.mean()


def twice_cut(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x[4:][:-4].narrow(0, 2, 12)), y[:12])


LOSSES: list[Callable[..., Tensor]] = [
    halves, triplets, views, interleaved, adapted, labelled_and_not, twice_cut,
]  # fmt: skip
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {}),
    ("dp=2,tp=2", {"zero": 3}),
    ("dp=1", {"microbatches": 2}),
    ("dp=2", {"microbatches": 2, "recompute": "full"}),
    ("pp=2", {"microbatches": 4}),
    ("pp=2,dp=2", {"microbatches": 2, "zero": 2}),
]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: loss_fn.__name__)
def test_each_rank_and_micro_batch_has_its_part(loss_fn: Callable[..., Tensor]) -> None:
    once = Once.of(net(), loss_fn, batch())
    for mesh, options in MESHES:
        compiled = once.compiled(mesh, **options)
        report, notes = once.report(compiled), compiled.notes
        assert report.ok, report
        whole = [note for note in notes if "divide" in note or "leaves" in note]
        assert not whole, (mesh, options, whole)


def test_what_couples_twice_is_computed_whole() -> None:
    """The gradient within is one of `torch.func`: its backward pass needs sums over the support behind other ones."""
    once = Once.of(net(), adapted_by_func, batch())
    for mesh, options in MESHES:
        if "pp" in mesh:
            with pytest.raises(CoupledError, match=r"micro-batches cannot be computed one after another"):
                once.compiled(mesh, **options)
            continue
        compiled = once.compiled(mesh, **options)
        notes = compiled.notes
        assert once.report(compiled).ok
        assert any("at once, for the whole batch" in note for note in notes) == ("microbatches" in options), notes
        assert not [note for note in notes if "divides no product" in note]


def third(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x[:6]), y[:6])


def some_whole(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x), y) + F.mse_loss(m(x[:6]), m(x[-6:]))


@pytest.mark.parametrize("loss_fn", [third, some_whole])
def test_rows_that_fall_into_no_parts_go_through_no_pipeline(loss_fn: Callable[..., Tensor]) -> None:
    asked: dict[str, Any] = {"loss_fn": loss_fn, "batch": batch(), "microbatches": 2}
    assert autopar.verify(net(), "pp=2", **asked).ok
    told = r"linear.py:\d+|test_cut_samples.py:\d+"
    with pytest.raises(
        LayoutError, match=rf"({told}).*computes 6 rows of the batch at once, which do not fall into 4 "
    ):
        autopar.compile(net(), "pp=2,dp=2", **asked)
    assert autopar.verify(net(), "dp=2", **asked).ok
