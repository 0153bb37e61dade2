"""Experts over Gloo processes around the step: parts of a batch that differ by rank, evaluation, averages."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import Kind, Mixture
from processes import Ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.ir.mesh import parse_mesh

pytestmark = pytest.mark.gloo

KIND, LENGTH = Kind(chosen=3, bias=True), 6
PARTS = ((5, 3, 0, 0), (0, 0, 0, 1))  # rows of the four ranks, by step: some have none
MESHES: list[tuple[str, dict[str, Any]]] = [("ep=4", {}), ("dp=2,ep=2", {"zero": 3})]


class Logits(nn.Module):
    """A mixture between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixed = nn.Embedding(16, KIND.width), Mixture(KIND)
        self.head = nn.Linear(KIND.width, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        out: Tensor = self.head(h + self.mixed(h)[0])
        return out


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _made() -> Logits:
    torch.manual_seed(3)
    return Logits().double()


def _batch(step: int, rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 16, (rows, length), generator=torch.Generator().manual_seed(step))
    return x, (x * 7 + torch.arange(length)) % 16


def _close(mine: Tensor, wanted: Tensor, what: object) -> None:
    torch.testing.assert_close(
        mine.detach(), wanted.detach(), rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def _trained(model: Any, plain: nn.Module, optimizers: list[torch.optim.Optimizer], mine: Any, whole: Any) -> None:
    """A step of both, whose losses, norms and then weights are alike."""
    loss, wanted = model.forward_backward(*mine), loss_fn(plain, *whole)
    wanted.backward()
    _close(loss, wanted, "loss")
    norms = [float(nn.utils.clip_grad_norm_(one.parameters(), 0.3)) for one in (model, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for (name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        _close(parameter.full_tensor(), own, name)


def _optimizers(*models: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]


def _unlike_parts(rank: int) -> None:
    for mesh, options in MESHES:
        plain = _made()
        model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, batch="local", **options)
        optimizers = _optimizers(model, plain)
        assert parse_mesh(mesh).size == len(PARTS[0])
        for step, rows in enumerate(PARTS):
            whole, end = _batch(step, sum(rows)), list(accumulate(rows))[rank]
            own = slice(end - rows[rank], end)
            with torch.no_grad():
                _close(model(whole[0][own]), plain(whole[0])[own], (mesh, step))
            _trained(model, plain, optimizers, [part[own] for part in whole], whole)
            counted = [sum(layer.by_expert) for layer in model.last.experts]  # none of a batch that no axis divides
            assert counted == [sum(rows) * LENGTH * KIND.chosen] * (sum(rows) % 4 == 0), (mesh, step, counted)


def test_ranks_have_unlike_parts_and_none(four: Ranks) -> None:
    four.run(_unlike_parts, timeout=120)


def _around(rank: int) -> None:
    for mesh, options in (MESHES[0], ("pp=2,ep=2", {"microbatches": 2})):
        plain = _made()
        model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, **options)
        optimizers = _optimizers(model, plain)
        ema, average = autopar.EMA(model, decay=0.7), AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        for step, (rows, length) in enumerate(((8, 6), (1, 4))):  # one row, which every rank computes
            batch = _batch(step, rows, length)
            _trained(model, plain, optimizers, batch, batch)
            told = [layer.by_expert for layer in model.last.experts]
            ema.update()
            average.update_parameters(plain)
            model.eval(), plain.eval()
            with torch.no_grad():
                for seen in (8, 1):
                    _close(model(_batch(9, seen)[0]), plain(_batch(9, seen)[0]), (mesh, step, seen))
            assert [layer.by_expert for layer in model.last.experts] == told, "of the step, not of an evaluation"
            model.train(), plain.train()
        with ema.applied(), torch.no_grad():
            _close(model(_batch(9, 8)[0]), average.module(_batch(9, 8)[0]), mesh)
        with model.gathered() as whole:
            _close(whole(_batch(9, 3)[0]), plain(_batch(9, 3)[0]), mesh)


def test_evaluation_and_averages_are_those_of_one_device(four: Ranks) -> None:
    four.run(_around, timeout=120)
