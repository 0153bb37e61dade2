"""Models with the ops that libraries use beside matmul and convolution: split over dp, tp and micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from torch import Tensor, nn
from verified import Once, verified

from autopar.api import compile

WIDTH, ROWS = 12, 6
D = torch.float64
Layer = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """x [6,12] through a layer, then what is tested, with a weight [12,12] of its own."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.up, self.layer = nn.Linear(WIDTH, WIDTH), layer
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.up(x), self.weight)
        return y.square().mean() if y.ndim else y


def images(x: Tensor) -> Tensor:
    return x.view(-1, 3, 2, 2)


def outer(x: Tensor) -> Tensor:
    """Three positive definite 4 by 4 matrices a row, with unlike eigenvalues."""
    v = x.view(-1, 3, 4, 1)
    return v @ v.mT + torch.diag(torch.arange(1.0, 5.0, dtype=x.dtype))


def uneven(x: Tensor) -> Tensor:
    """A matrix for each row that is not symmetric."""
    v = x.view(-1, 3, 4, 1)
    return v @ v.mT.roll(1, -1) + torch.diag(torch.arange(2.0, 6.0, dtype=x.dtype))


def sides(x: Tensor) -> Tensor:
    return x.view(-1, 3, 4, 1)


def quantised(x: Tensor, codes: Tensor) -> Tensor:
    """A VQ codebook with the straight-through estimator, and the term that draws the codes to the inputs."""
    nearest = codes[torch.cdist(x, codes).argmin(-1)]
    return x + (nearest - x).detach() + (nearest - x.detach()).square()


def diagonal_of(w: Tensor, value: Tensor) -> Tensor:
    w = w.clone()
    w.diagonal().copy_(value)
    return w


def positive(w: Tensor) -> Tensor:
    return w @ w.T + torch.eye(WIDTH, dtype=w.dtype)


LAYERS: dict[str, Layer] = {
    "pixel_shuffle": lambda x, w: F.pixel_shuffle((x @ w).view(-1, 12, 1, 1) * w[:, :6].view(12, 2, 3), 2),
    "pixel_unshuffle": lambda x, w: F.pixel_unshuffle(images(x @ w), 2),
    "channel_shuffle": lambda x, w: F.channel_shuffle((x @ w).view(-1, 12, 1, 1), 3) * w[0].view(12, 1, 1),
    "cdist": lambda x, w: torch.cdist(x @ w, w),
    "cdist, many": lambda x, w: torch.cdist((x @ w).unsqueeze(1) + w.repeat(3, 1), w).min(-1)[0],
    "cdist, p=1": lambda x, w: torch.cdist(x @ w, w, p=1),
    "codebook": quantised,
    "codebook of a product": lambda x, w: quantised(x @ w, w),
    "searchsorted": lambda x, w: x + w[torch.searchsorted(torch.linspace(-1, 1, 11, dtype=D), x.detach())[:, 0]],
    "searchsorted, rows": lambda x, w: x @ w * torch.searchsorted(x.detach().sort(-1)[0], x.detach() @ w.detach()),
    "block_diag": lambda x, w: x @ torch.block_diag(w[:4, :4], w[4:, 4:]),
    "diag": lambda x, w: x @ torch.diag(w[0]) + torch.diag(w),
    "diag_embed": lambda x, w: torch.diag_embed(x) @ w,
    "diagonal_copy": lambda x, w: torch.diagonal_copy(x.unsqueeze(-1) * w, 0, 1, 2),
    "fill_diagonal_": lambda x, w: (x @ w) @ (x @ w).T.clone().fill_diagonal_(0.5).detach().sum().sigmoid().mul(w),
    "diagonal written": lambda x, w: x @ diagonal_of(w, w[0]),
    "solve": lambda x, w: torch.linalg.solve(outer(x), sides(x @ w)),
    "solve, one matrix": lambda x, w: torch.linalg.solve(positive(w), x.T),
    "solve, vectors": lambda x, w: torch.linalg.solve(outer(x), (x @ w).view(-1, 3, 4)),
    "solve, as it lies": lambda x, w: torch.linalg.solve(uneven(x @ w), sides(x)),
    "solve, transposed": lambda x, w: torch.linalg.solve(uneven(x @ w).mT, sides(x)),
    "solve from the right": lambda x, w: torch.linalg.solve(uneven(x @ w), sides(x).mT, left=False),
    "inv": lambda x, w: torch.linalg.inv(outer(x @ w)),
    "cholesky": lambda x, w: torch.linalg.cholesky(outer(x @ w)),
    "cholesky_solve": lambda x, w: torch.cholesky_solve(sides(x @ w), torch.linalg.cholesky(outer(x))),
    "det of matrices that are not symmetric": lambda x, w: (
        torch.linalg.det(uneven(x @ w)) + torch.linalg.det(uneven(x @ w).mT * 2)
    ),
    "slogdet of matrices that are not symmetric": lambda x, w: (
        torch.linalg.slogdet(uneven(x @ w))[1] + torch.linalg.slogdet(uneven(x).mT @ uneven(x @ w))[1]
    ),
    "solve of a matrix that is not symmetric": lambda x, w: torch.linalg.solve(uneven(x @ w).mT, sides(x)),
    "det": lambda x, w: torch.linalg.det(uneven(x @ w)),
    "det, transposed": lambda x, w: torch.linalg.det(uneven(x @ w).mT) * torch.linalg.det((x @ w).view(-1, 3, 2, 2)),
    "slogdet": lambda x, w: torch.linalg.slogdet(outer(x @ w))[1],
    "slogdet of a weight": lambda x, w: x @ w + torch.linalg.slogdet(positive(w))[1],
    "eigh": lambda x, w: torch.linalg.eigvalsh(outer(x @ w)),
    "svd": lambda x, w: torch.linalg.svdvals(outer(x @ w)),
    "qr": lambda x, w: torch.linalg.qr(outer(x @ w))[1].abs(),
    "pinv": lambda x, w: torch.linalg.pinv(outer(x @ w)),
    "matrix_exp": lambda x, w: torch.matrix_exp(outer(x @ w) * 0.1),
    "grid_sample": lambda x, w: F.grid_sample(
        images(x @ w), (x[:, :8].view(-1, 2, 2, 2) * 0.5).tanh(), align_corners=False
    ),
    "affine_grid": lambda x, w: F.grid_sample(
        images(x @ w), F.affine_grid(x[:, :6].view(-1, 2, 3), [len(x), 3, 2, 2], align_corners=False),
        align_corners=False,
    ),
    "rot90": lambda x, w: torch.rot90((x @ w).view(-1, 3, 4), 1, (1, 2)) * w[0].view(4, 3),
    "trace": lambda x, w: x @ w + torch.trace(w),
    "addr": lambda x, w: x @ torch.addr(w, w[0], w[1]),
    "nansum": lambda x, w: torch.nansum(x @ w, -1),
    "count_nonzero": lambda x, w: (x @ w) * torch.count_nonzero(x > 0, -1)[:, None],
    "renorm": lambda x, w: torch.renorm(x @ w, 2, 0, 1.0) * w[0],
    "linalg.cross": lambda x, w: torch.linalg.cross((x @ w).view(-1, 4, 3), x.view(-1, 4, 3)),
    "pairwise_distance": lambda x, w: F.pairwise_distance(x @ w, x),
    "bilinear": lambda x, w: F.bilinear(x, x, w.view(12, 12, 1) * w, w[0]),
    "combinations": lambda x, w: (x @ w) * torch.combinations(w[0], 3, True).prod(-1).sum(),
    "tensor_split": lambda x, w: torch.tensor_split(x @ w, torch.tensor([2, 8]), dim=1)[1] * x[:, :6],
    "narrow": lambda x, w: (x @ w).narrow(1, torch.tensor(-5), 4) * torch.narrow(x, 1, (w[0, :1] > 0).long()[0], 4),
    "cov": lambda x, w: x @ torch.cov((x @ w).T),
    "corrcoef": lambda x, w: x @ torch.corrcoef((x @ w).T) * torch.cov(x[:, 0] + w[0, 0]),
    "gaussian_nll": lambda x, w: F.gaussian_nll_loss(x @ w, x, (x @ w * 3 - 4).exp(), True, 0.01, reduction="none"),
    "take": lambda x, w: torch.take(w, (x > 0).long().cumsum(-1) - 5) * x,
    "std_mean": lambda x, w: torch.stack(torch.std_mean(x @ w, -1)),
    "triplet": lambda x, w: F.triplet_margin_loss(x @ w, x, x.flip(1)),
    "multi_margin": lambda x, w: F.multi_margin_loss(x @ w, x.detach().argmax(-1)),
    "multilabel_margin": lambda x, w: F.multilabel_margin_loss(x @ w, x.detach().argsort(-1)),
    "mode": lambda x, w: (x @ w) * x.detach().round().mode(-1)[0][:, None],
    "isin": lambda x, w: (x @ w) * torch.isin(x.detach().round(), torch.tensor([0.0, 1.0], dtype=D)),
    "special": lambda x, w: torch.special.i1e(x @ w) + torch.special.entr((x @ w).sigmoid()),
    "max_unpool": lambda x, w: F.max_unpool2d(*F.max_pool2d(images(x @ w), 2, return_indices=True), 2),
    "antialias": lambda x, w: F.interpolate(images(x @ w), scale_factor=2, mode="bilinear", antialias=True),
}  # fmt: skip
# A product over the rows of the batch: the loss of a micro-batch hangs on the others'.
OF_THE_BATCH = ("fill_diagonal_", "cov", "corrcoef")


def batch() -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(ROWS, WIDTH),)


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(LAYERS, ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), 3)))
def test_the_numbers_are_those_of_one_device(name: str, meshes: tuple[str, ...]) -> None:
    once = Once.of(Net(LAYERS[name]), None, batch())
    found = [once.right(mesh) for mesh in meshes]
    for _, compiled in found:
        assert not [note for note in compiled.program.notes if "no rule" in note]
    if name not in OF_THE_BATCH:
        once.right("dp=2", microbatches=3)
        gathered = [row for row in found[0][1].collectives if row.op != "all_reduce" and row.axis == "dp"]
        assert gathered == []


class Speech(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.up, self.reduction = nn.Linear(WIDTH, WIDTH), reduction

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        scores = self.up(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, targets, lengths, counts, reduction=self.reduction, zero_infinity=True)
        return loss.mean() if self.reduction == "none" else loss


def spoken() -> tuple[Tensor, ...]:
    """The last target is longer than what it should be said in: an infinite loss, which counts as none."""
    torch.manual_seed(0)
    lengths, counts = torch.tensor([8, 7, 6, 8, 8, 2]), torch.tensor([3, 2, 3, 1, 3, 3])
    return torch.randn(ROWS, 8, WIDTH), torch.randint(1, WIDTH, (ROWS, 3)), lengths, counts


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss(reduction: str) -> None:
    model = Speech(reduction)
    found = verified(model, ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), None, spoken())
    verified(model, ("dp=2",), None, spoken(), microbatches=3)
    assert not [row for row in found[0][1].collectives if row.op == "all_gather" and row.axis == "dp"]


def test_ctc_loss_of_lists_and_of_targets_in_a_row() -> None:
    """Lengths may be Python numbers, and targets in one row, whatever their lengths are."""

    class Listed(nn.Module):
        def __init__(self, flat: bool) -> None:
            super().__init__()
            self.up, self.flat = nn.Linear(WIDTH, WIDTH), flat

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            scores = self.up(x).log_softmax(-1).transpose(0, 1)
            targets = targets.flatten() if self.flat else targets
            return F.ctc_loss(scores, targets, (8,) * ROWS, (3, 3, 3, 3, 3, 3))

    for flat in (False, True):
        verified(Listed(flat), ("dp=2,tp=2", "dp=3"), None, spoken()[:2])

    class InOneRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, lengths: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
            return F.ctc_loss(self.up(x).log_softmax(-1).transpose(0, 1), targets, lengths, counts)

    x, targets, lengths, counts = spoken()
    counts[-1] = 1
    row = torch.cat([target[:count] for target, count in zip(targets, counts.tolist(), strict=True)])
    verified(InOneRow(), ("dp=2,tp=2", "dp=3"), None, (x, lengths, counts, row))
    verified(InOneRow(), ("dp=2",), None, (x, lengths, counts, row), microbatches=3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no linear_cross_entropy")
def test_linear_cross_entropy() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return F.linear_cross_entropy(self.up(x), self.head.weight, label, linear_bias=self.head.bias)

    given = (*batch(), torch.tensor([3, -100, 0, 11, 5, 5]))
    found = verified(Head(), ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), None, given)
    verified(Head(), ("dp=2",), None, given, microbatches=3)
    assert not [note for note in found[0][1].program.notes if "no rule" in note]


def test_the_length_of_everything_is_a_sum() -> None:
    """A penalty on a norm: of a weight that tp splits, and of activations that dp splits."""
    loss = lambda model, x: model(x) + 0.1 * model.weight.norm() + 0.01 * torch.dist(model.up(x), x)  # noqa: E731
    model = Net(lambda x, w: x @ w)
    found = verified(model, ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), loss, batch())
    assert {row.op for row in found[0][1].collectives} == {"all_reduce"}
    assert compile(model, "tp=2", loss_fn=loss, batch=(torch.randn(ROWS, WIDTH, dtype=D),)).program.notes == ()
