"""Rows that a mask selects and that are taken together: `losses[mask].mean()`, as losses of all kinds spell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of logits [12, 6], labels and a mask [12]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).relu())


def weighted(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Labels that are left out beside those of the mask, weights by class, and smoothing."""
    weight = torch.arange(1.0, 7.0, dtype=y.dtype)
    return F.cross_entropy(y[mask], labels[mask], weight, ignore_index=2, label_smoothing=0.1)


def within(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Parts of each row are written."""
    z = y[mask] * 2
    z[:, 0] = 1
    z[..., 1] = z[..., 2]
    z[:, 3:] = z[:, :3].exp()
    z[:, 4] += 1
    return z.square().mean()


def spline(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """nflows: a check of what is inside, which is computed apart."""
    inside = y.abs() < 0.3
    out, z = torch.zeros_like(y), y[inside]
    if z.min() < -1 or torch.max(z) > 1:
        raise ValueError("outside")
    assert (z.square() >= 0).all()
    out[~inside] = y[~inside]
    out[inside] = z.tanh() * 3
    return out.square().mean()


def in_short(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Their sum has no room in float16; the mean has."""
    return (y[mask].half() * 0 + 30000).mean().to(y.dtype) * 1e-4 + y.square().mean()


def columns(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The places of a mask of two dims, a row for each, and their numbers."""
    at = (labels[:, None] == labels).nonzero()
    return (y[at[:, 0]] - y[at.T[1]]).exp().mean() + y.mean() * at.to(y.dtype).mean() + y[at[:, 1:].squeeze(1)].sum()


LOSSES: dict[str, Loss] = {
    "mean": lambda y, labels, mask: y[mask].mean(),
    "sum over a count": lambda y, labels, mask: y[mask].sum() / mask.sum(),
    "mean of a function": lambda y, labels, mask: (y[mask] - 1).square().mean(),
    "by column": lambda y, labels, mask: y[mask].mean(0).square().sum(),
    "kept dims": lambda y, labels, mask: (y[mask] - y[mask].mean(dim=(0, 1), keepdim=True)).square().sum(),
    "by name": lambda y, labels, mask: y[mask].t().sum(axis=1).square().sum(),
    "mse_loss": lambda y, labels, mask: F.mse_loss(y[mask], torch.ones_like(y[mask])),
    "mse_loss, summed": lambda y, labels, mask: F.mse_loss(y[mask], y[mask].detach() * 2, reduction="sum"),
    "cross_entropy": lambda y, labels, mask: F.cross_entropy(y[mask], labels[mask]),
    "cross_entropy, summed": lambda y, labels, mask: F.cross_entropy(y[mask], labels[mask], reduction="sum"),
    "cross_entropy of each": lambda y, labels, mask: F.cross_entropy(y[mask], labels[mask], reduction="none").mean(),
    "cross_entropy of chances": lambda y, labels, mask: F.cross_entropy(y[mask], (y[mask] * 3).detach().softmax(-1)),
    "nll_loss": lambda y, labels, mask: F.nll_loss(y.log_softmax(-1)[mask], labels[mask]),
    "kl_div": lambda y, labels, mask: F.kl_div(
        y[mask].log_softmax(-1), y[mask].detach().softmax(-1) + 0.1, reduction="batchmean"
    ),
    "binary cross entropy": lambda y, labels, mask: F.binary_cross_entropy_with_logits(y[mask], y[mask] * 0 + 0.5),
    "smooth_l1_loss": lambda y, labels, mask: F.smooth_l1_loss(y[mask], y[mask] * 0, beta=0.1),
    "module": lambda y, labels, mask: nn.HuberLoss()(y[mask], torch.zeros_like(y[mask])),
    "masked_select": lambda y, labels, mask: torch.masked_select(y, mask[:, None]).square().mean(),
    "elements": lambda y, labels, mask: y[y > 0].mean() + y.masked_select(y < 0).square().sum(),
    "three dims": lambda y, labels, mask: (y[:, :, None] * y[:, None])[y[:, :, None] > y[:, None]].mean(),
    "places": lambda y, labels, mask: y[torch.where(mask)[0]].mean() + y[mask.nonzero().squeeze(1)].sum(),
    "pairs": lambda y, labels, mask: (y @ y.t())[torch.where(labels[:, None] == labels)].exp().mean(),
    "two masks": lambda y, labels, mask: y[mask].mean() + y[~mask].square().mean(),
    "once more": lambda y, labels, mask: (lambda z: z[z[:, 0] > 0].mean())(y[mask]),
    "largest": lambda y, labels, mask: y[mask].max() + y[mask].amin(0).sum() + y[mask].min(),
    "logsumexp": lambda y, labels, mask: torch.logsumexp(y[mask], 0).square().sum(),
    "norm": lambda y, labels, mask: torch.linalg.vector_norm(y[mask]) + y[mask].norm(p=1) + y[mask].norm(2, 0).sum(),
    "product": lambda y, labels, mask: y[mask].prod(0).sum() + (y[mask] > 0).any() * y[mask].mean(),
    "a log of padding": lambda y, labels, mask: (y * mask[:, None]).abs()[mask].log().mean(),
    **{loss.__name__: loss for loss in (weighted, within, spline, in_short, columns)},
}  # fmt: skip


def batch(share: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 8), torch.randint(0, 4, (12,)), torch.rand(12) > share


def _verified(loss: Loss, given: Any, mesh: str, **options: Any) -> None:
    torch.manual_seed(1)
    report = autopar.verify(
        Net(), mesh, batch=given, loss_fn=lambda model, x, *others: loss(model(x), *others), **options
    )
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(LOSSES, ("dp=2,tp=2", "dp=3", "mb=2"), 3)))
def test_the_numbers_are_those_of_one_device(name: str, meshes: tuple[str, ...]) -> None:
    for mesh in meshes:
        options: dict[str, Any] = {"microbatches": 2} if mesh == "mb=2" else {}
        _verified(LOSSES[name], batch(), "dp=2" if options else mesh, **options)


# --- a model that asks how many there are


def other(y: Tensor) -> Tensor:
    return y.square().mean()


def counted(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """pytorch-metric-learning, and everybody else: the mean of none is no number."""
    z = y[mask]
    return z.mean() if len(z) > 0 else other(y)


def numbered(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    z = y[mask]
    if z.numel() == 0:
        return other(y)
    return F.mse_loss(z, torch.ones_like(z))


def once_more(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    z = y[mask]
    z = z[z[:, 0] > -1]
    if z.shape[0] == 0:
        return other(y)
    return z.square().mean()


def by_class(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A loop over classes, of which some are not in the batch."""
    total = y.sum() * 0
    for number in range(5):
        z = y[labels == number]
        if z.size(0) == 0:
            continue
        total = total + z.mean(0).square().sum()
    return total


def put_back(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    out, z = torch.zeros_like(y), y[mask]
    if z.numel() > 0:
        out[mask] = z.tanh()
    return out.square().mean() + z.sum()


def places(y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    at = torch.where(mask)[0]
    return F.cross_entropy(y[at], labels[at]) if len(at) else other(y)


COUNTS = (counted, numbered, once_more, by_class, put_back, places)


def _cases() -> Iterator[tuple[str, Loss, float]]:
    for share, some in ((0.4, "some"), (2.0, "none")):
        for loss in COUNTS:
            yield f"{loss.__name__}, {some}", loss, share


CASES = {name: (loss, share) for name, loss, share in _cases()}


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(CASES, ("dp=2,tp=2", "dp=3", "mb=2"), 3)))
def test_none_are_another_program(name: str, meshes: tuple[str, ...]) -> None:
    loss, share = CASES[name]
    for mesh in meshes:
        options: dict[str, Any] = {"microbatches": 2} if mesh == "mb=2" else {}
        _verified(loss, batch(share), "dp=2" if options else mesh, **options)


@pytest.mark.parametrize("loss", COUNTS, ids=lambda loss: loss.__name__)
def test_batches_by_turns(loss: Loss) -> None:
    """Some, none, and others, with one parallel model."""
    torch.manual_seed(1)
    model = Net().double()
    parallel = autopar.parallelize(model, "dp=1", loss_fn=lambda model, x, *others: loss(model(x), *others))
    torch.manual_seed(1)
    plain = Net().double()
    for share in (0.4, 2.0, 0.7, 2.0):
        x, labels, mask = batch(share)
        labels = labels if share < 1 else labels.clamp(max=2)
        parallel.zero_grad()
        plain.zero_grad()
        found, want = parallel.forward_backward(x.double(), labels, mask), loss(plain(x.double()), labels, mask)
        want.backward()
        torch.testing.assert_close(found, want.detach())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(parallel.full_gradients()[name], parameter.grad)


def test_it_is_noted() -> None:
    torch.manual_seed(1)
    found = autopar.compile(Net(), "dp=2", batch=batch(), loss_fn=lambda model, x, *more: counted(model(x), *more))
    (note,) = found.notes
    assert note.startswith("whether a mask selects rows at ") and "is taken as True; each step checks" in note


# --- what still sees the padding

REFUSED: dict[str, tuple[Loss, str]] = {
    "their number": (lambda y, labels, mask: y[mask].sum() / y[mask].shape[0], "how many rows a mask selects"),
    "a largest with its place": (lambda y, labels, mask: y[mask].max(0)[0].sum(), "here max.. does not"),
    "a deviation": (lambda y, labels, mask: y[mask].std(), "here std.. does not: it adds the rows up"),
    "a product of rows": (lambda y, labels, mask: (y[mask].t() @ y[mask]).sum(), "here matmul.. does not"),
    "a median": (lambda y, labels, mask: y[mask].median(), "here median.. does not"),
    "rows of two masks": (lambda y, labels, mask: (y[mask] + y[labels > 1]).sum(), "it takes rows of two masks"),
    "a norm of their least": (lambda y, labels, mask: y[mask].norm(-torch.inf), "here norm.. does not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_the_padding_is_refused(name: str) -> None:
    loss, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(Net(), lambda model, x, *others: loss(model(x), *others), batch(), {})
