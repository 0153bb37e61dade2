"""What a model leaves out where a mask has no rows: a parameter of which no call is made has no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import CaptureError

EXPERTS, WIDTH = 4, 6


class Mixture(nn.Module):
    """Two of the experts for each token. silent: the expert that gets none."""

    def __init__(self, way: Way, silent: int | None = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.router, self.out = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS)
        )
        self.silence(silent)

    @torch.no_grad()
    def silence(self, expert: int | None) -> None:
        self.router.bias.zero_()
        if expert is not None:
            self.router.bias[expert] = -100

    def expert(self, number: Any, x: Tensor) -> Tensor:
        made: Tensor = self.experts[number](x)
        return made

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out: Tensor = self.out(self.way(self, rows, weights, F.one_hot(chosen, EXPERTS).permute(2, 1, 0)))
        return out.reshape(x.shape)


Way = Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]


def numel(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        if row.numel() == 0:
            continue
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out


def taken_before(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        mine, share = x[row], weights[row, at, None]
        if len(mine):
            out = out.index_add(0, row, m.expert(e, mine) * share)
    return out


def in_place(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        if row.shape[0] > 0:
            out[row] += m.expert(e, x[row]) * weights[row, at, None]
    return out


def hit(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """As transformers' models have it."""
    out = torch.zeros_like(x)
    for e in torch.greater(hot.sum((-1, -2)), 0).nonzero():
        at, row = torch.where(hot[e].squeeze(0))
        out.index_add_(0, row, m.expert(e, x[None, row].reshape(-1, WIDTH)) * weights[row, at, None])
    return out


def hit_number(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hot.flatten(1).any(-1).nonzero(as_tuple=True)[0]:
        if e == EXPERTS:
            continue
        at, row = torch.where(hot[e])
        out.index_add_(0, row, m.expert(e.item(), x[row]) * weights[row, at, None])
    return out


def hit_list(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hot.sum((-1, -2)).nonzero().flatten().tolist():
        at, row = torch.where(hot[e])
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out


def hit_lists(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """Lists of one number, and rows by another mask than the one that is counted."""
    out, chosen = torch.zeros_like(x), hot.argmax(0)
    for (e,) in (hot.sum((-1, -2)) > 0).nonzero().tolist():
        at, row = torch.where(chosen == e)
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out


def twice(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    y = numel(m, x, weights, hot)
    weights, chosen = m.router(y).softmax(-1).topk(2)
    return hit(m, y, weights, F.one_hot(chosen, EXPERTS).permute(2, 1, 0))


def dropped(way: Way) -> Way:
    """With dropout of the rows of each expert, of all before them and of all behind."""

    def with_dropout(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
        expert, m.expert = m.expert, lambda e, rows: F.dropout(Mixture.expert(m, e, F.dropout(rows, 0.3)), 0.2)  # type: ignore[method-assign]
        try:
            return F.dropout(way(m, F.dropout(x, 0.1), weights, hot), 0.3)
        finally:
            m.expert = expert  # type: ignore[method-assign]

    with_dropout.__name__ = f"dropped {way.__name__}"
    return with_dropout


def counted(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """A number of Python's says how many had rows."""
    out, count = torch.zeros_like(x), 0
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        if len(row) > 0:
            count += 1
            out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out / count


def numbered(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """Each turn has the number of those before it."""
    out = torch.zeros_like(x)
    for i, e in enumerate(hot.sum((-1, -2)).nonzero()):
        at, row = torch.where(hot[e].squeeze(0))
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None] * (i + 1))
    return out


def balanced(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """What is added up is of no row."""
    out, total = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        if row.numel() == 0:
            continue
        total = total + weights[:, 0].mean()
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out * total


def listed(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """A list is made of them first."""
    out = torch.zeros_like(x)
    for e in sorted(hot.sum((-1, -2)).nonzero().flatten().tolist(), reverse=True):
        at, row = torch.where(hot[e])
        out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out


def otherwise(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
    """Something else is computed for no rows."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        at, row = torch.where(hot[e])
        if row.numel() == 0:
            out = out + 0.1 * m.expert(e, x).mean()
        else:
            out = out.index_add(0, row, m.expert(e, x[row]) * weights[row, at, None])
    return out


LEFT_OUT: list[Way] = [numel, taken_before, in_place, hit, hit_number, hit_list, hit_lists, twice]
OTHER: list[Way] = [counted, numbered, balanced, listed, otherwise]


def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = m(x)
    return out.square().mean()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


CASES = [
    *((way, "dp=2", {}) for way in (*LEFT_OUT, *OTHER)),
    (twice, "pp=2", {"microbatches": 2}),
    *((way, "ep=2", {}) for way in (taken_before, hit, hit_list, hit_lists, twice)),
    (hit_list, "ep=2", {"microbatches": 2}),
    *((dropped(way), "dp=2", {}) for way in (numel, hit, twice, listed)),
    *((dropped(way), "ep=2", {"zero": 1}) for way in (in_place, hit_number, hit_list, twice)),
    (dropped(hit), "pp=2", {"microbatches": 2, "recompute": "full"}),
    (numel, "fsdp=2,tp=2", {}),
    (hit, "dp=2", {"zero": 3, "recompute": "full"}),
]


@pytest.mark.parametrize(("way", "mesh", "options"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_an_expert_without_rows(way: Way, mesh: str, options: dict[str, Any]) -> None:
    """Its weights have no gradient, and AdamW leaves them as they are."""
    report = autopar.verify(Mixture(way), mesh, loss_fn=loss_fn, batch=batch(), **options)
    assert report.ok and report.max_error < 1e-12, report


@pytest.mark.parametrize("way", [numel, hit, balanced])
def test_another_one_in_each_step(way: Way) -> None:
    """Weights, and which parameters have a gradient, over steps with weight decay and momentum."""
    plain = Mixture(way, None).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    pairs = [(dict(one.named_parameters()), one) for one in (model, plain)]
    optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in (model, plain)]
    for step in range(5):
        for (named, _), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.no_grad():
                named["router.bias"].zero_()
                named["router.bias"][step % EXPERTS] = -100
        x = batch(step).double()
        model.training_loss(x).backward()
        loss_fn(plain, x).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, ours in pairs[0][0].items():
            theirs = pairs[1][0][name]
            assert (ours.grad is None) == (theirs.grad is None), (step, name)
            torch.testing.assert_close(whole(ours), whole(theirs), rtol=0, atol=1e-12)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_batches_of_each_rank() -> None:
    """As DistributedDataParallel: an expert that one rank uses has a gradient on all."""
    batches = [(batch(1)[:1],), (batch(2)[:1, :2],)]
    for way, silent in ((hit, None), (hit, 2), (dropped(hit), None)):
        assert autopar.verify(Mixture(way, silent), "dp=2", loss_fn=loss_fn, batch=batches, ddp=True).ok


def test_nothing_is_read_where_nothing_hangs_on_it() -> None:
    def plainly(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            at, row = torch.where(hot[e])
            out.index_add_(0, row, m.expert(e, x[row]) * weights[row, at, None])
        return out

    program = autopar.compile(Mixture(plainly), "dp=2", loss_fn=loss_fn, batch=batch()).program
    assert not [out for out in program.outputs if out.kind == "guard"]
    program = autopar.compile(Mixture(numel), "dp=2", loss_fn=loss_fn, batch=batch()).program
    assert len([out for out in program.outputs if out.kind == "guard"]) == 1
    (note,) = [note for note in program.notes if "how many rows masks select" in note]
    assert "test_row_sides.py" in note and "have no gradient, as on one device" in note


def test_their_number_is_refused() -> None:
    def share(m: Mixture, x: Tensor, weights: Tensor, hot: Tensor) -> Tensor:
        return numel(m, x, weights, hot) / len(hot.sum((-1, -2)).nonzero())

    with pytest.raises(CaptureError, match="the model computes with how many rows a mask selects"):
        autopar.compile(Mixture(share), "dp=2", loss_fn=loss_fn, batch=batch())
