"""`training_loss` under `torch.no_grad()`: the loss of a batch that is not trained on, between steps that train."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.gloo

CLASSES = 10


class Net(nn.Module):
    """BatchNorm keeps statistics, which a forward pass in training mode changes."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(6, 8, bias=False), norm(8)
        self.down = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(x)).relu()).tanh())


class OwnLoss(Net):
    """Gives its loss beside its output, as models of transformers do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y, ignore_index=3), "logits": logits}


def masked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=3)


def with_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits, y), {"right": (logits.argmax(-1) == y).sum(), "best": logits.max(-1).values}


def contrasted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Takes samples together."""
    z = F.normalize(model(x), dim=-1)
    return F.cross_entropy(z @ z.T * 3, y % len(z))


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """With a gradient of its own, which validation has as well."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return F.cross_entropy(model(x), y) + slope.square().mean()


CASES: dict[str, tuple[type[Net], Any]] = {
    "masked": (Net, masked), "aux": (Net, with_accuracy), "contrasted": (Net, contrasted), "own": (OwnLoss, None),
    "penalised": (Net, penalised),
}  # fmt: skip
PLACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {}), ("tp=2", {}), ("dp=2", {"zero": 3}), ("fsdp=2", {"microbatches": 2}), ("pp=2", {"microbatches": 2}),
    ("dp=2", {"recompute": "full"}),
)  # fmt: skip


def batch(at: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(at)
    return (
        torch.randn(rows, 6, generator=dice, dtype=torch.float64),
        torch.randint(0, CLASSES, (rows,), generator=dice),
    )


def loss_of(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    """The loss on one device, and what came beside it."""
    found = model(x, y)["loss"] if loss_fn is None else loss_fn(model, x, y)
    return found if isinstance(found, tuple) else (found, None)


def loop(model: Any, loss_fn: Any) -> list[Any]:
    """Train, validate in both modes, and train again: all that comes out."""
    is_parallel, found = isinstance(model, autopar.ParallelModule), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for at in range(3):
        for mode, trains in ((True, True), (False, False), (True, False)):
            model.train(mode)
            given = batch(10 * at + 2 * mode + trains, 12 if trains else 6)
            with torch.set_grad_enabled(trains):
                if is_parallel:
                    loss, beside = model.training_loss(*given), model.last_aux if loss_fn is with_accuracy else None
                else:
                    loss, beside = loss_of(model, loss_fn, *given)
            assert loss.requires_grad == trains
            found += [loss.detach().clone(), copy.deepcopy(beside) if beside is None else list(beside.values())]
            if trains:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found.append(model.full_state_dict() if is_parallel else copy.deepcopy(dict(model.state_dict())))
    return found


def norm_for(options: dict[str, Any]) -> type[nn.Module]:
    """Micro-batches cannot have the statistics of the batch in training."""
    return nn.LayerNorm if "microbatches" in options else nn.BatchNorm1d


def _on_ranks(rank: int, mesh: str, options: dict[str, Any], case: str) -> list[Any]:
    kind, loss_fn = CASES[case]
    return loop(autopar.parallelize(kind(norm_for(options)).double(), mesh, loss_fn=loss_fn, **options), loss_fn)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_one_device(two: Ranks, case: str) -> None:
    kind, loss_fn = CASES[case]
    for mesh, options in PLACES:
        plain = loop(kind(norm_for(options)).double(), loss_fn)
        for rank, found in enumerate(two.run(_on_ranks, mesh, options, case)):
            if rank:
                found[6::7] = plain[6::7]  # rank 0 alone has the whole state
            said = partial("{} {} rank {}: {}".format, mesh, options, rank)
            torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10, msg=said)


def _gathered(rank: int) -> list[bool]:
    model = autopar.parallelize(Net().double(), "dp=2", loss_fn=masked)
    with torch.no_grad():
        model.training_loss(*batch(0))
        model(batch(0)[0])
    texts = ["".join(running.compiled.lines()).splitlines() for running in model.programs]
    return [any("all_gather" in line and f"[12,{CLASSES}] " in line for line in lines) for lines in texts]


def test_no_rank_has_the_whole_output_for_it(two: Ranks) -> None:
    assert two.run(_gathered) == [[False, True]] * 2
