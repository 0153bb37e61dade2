"""A weight that several stages use: once a step it goes to them, and once a step its gradient comes home, in whatever
precision its parts are computed and however it lies split over the data axes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import pairs
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.compiled import Compiled
from autopar.ir.program import TensorType

WORDS, WIDTH, ROWS = 40, 8, 24


class Tied(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Shared(Tied):
    """One weight in every layer, and a product with itself: stages share what is gathered, and what is made of that."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x, mix = self.tokens(ids), self.square @ self.square.T
        for layer in self.layers:
            x = layer(x).tanh() + x @ mix @ self.square
        return self.head(x)


def loss(model: nn.Module, ids: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float(), wanted, ignore_index=3)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rare words and many labels that do not count, all at one end."""
    torch.manual_seed(0)
    ids = (torch.rand(rows) ** 3 * WORDS).long()
    return ids, torch.where(torch.arange(rows) < rows // 4, 3, ids.roll(1))


def messages(compiled: Compiled) -> dict[str, list[TensorType]]:
    """What a step sends of the table (P) and of its gradient (any other action), as long as a rank's part of it."""
    assert compiled.pipeline is not None
    lengths, found = {WORDS, WORDS // compiled.mesh["dp"]}, {}
    for instruction in (one for each in compiled.pipeline.lists for one in each if one.op == "RECV"):
        long = [type_ for type_ in instruction.types if lengths & {*type_.shape}]
        found[instruction.action.kind] = [*found.get(instruction.action.kind, []), *long]
    return {kind: types for kind, types in found.items() if types}


@pytest.mark.parametrize(
    ("zero", "precision", "schedule"), list(pairs(range(4), (None, "bf16"), ("1f1b", "interleaved-1f1b", "zb-h1")))
)
def test_the_table_and_its_gradient_are_sent_once_a_step(zero: int, precision: str | None, schedule: str) -> None:
    """With ZeRO the part of a rank: of the table, and where gradients are scattered of these. Before, with ZeRO-2 and
    ZeRO-3 the whole gradient was sent for every micro-batch, and with ZeRO-3 the gathered table and the logits'."""
    asked: dict[str, Any] = {"precision": precision} if precision else {}
    compiled = autopar.compile(
        Tied(), "pp=2,dp=2", loss_fn=loss, batch=batch(), microbatches=4, schedule=schedule, zero=zero, **asked
    )
    whole, part = (TensorType((rows, WIDTH), torch.float32) for rows in (WORDS, WORDS // 2))
    gradients = "W" if schedule == "zb-h1" else "B"
    assert messages(compiled) == {"P": [part if zero else whole], gradients: [part if zero > 1 else whole]}


MESHES = ["pp=2,dp=3", "pp=2,dp=2,tp=2", "pp=3,dp=2", "pp=2,dp=2,fsdp=3"]
SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v"]


@functools.cache
def once(kind: type[Tied]) -> Once:
    """Captured once for all meshes and schedules."""
    torch.manual_seed(0)
    return Once.of(kind(6), loss, batch(48))


@pytest.mark.parametrize(
    ("mesh", "kind", "schedule", "zero", "recompute"),
    list(pairs(MESHES, (Tied, Shared), SCHEDULES, (2, 3), ("none", "full"))),
)
def test_the_numbers_are_those_of_one_device(
    mesh: str, kind: type[Tied], schedule: str, zero: int, recompute: str
) -> None:
    """Any two of these come together; any three in `make test-all`."""
    once(kind).right(mesh, steps=2, microbatches=4, schedule=schedule, zero=zero, recompute=recompute)


@pytest.mark.parametrize(
    ("mesh", "zero", "schedule"), list(pairs(MESHES, (0, 2, 3), ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")))
)
def test_in_a_short_float_they_are_as_close_as_on_one_device(mesh: str, zero: int, schedule: str) -> None:
    """Any two of these come together; all three in `make test-all`."""
    asked: dict[str, Any] = {"microbatches": 4, "zero": zero, "precision": "bf16"}
    torch.manual_seed(0)
    report = autopar.verify(Tied(), mesh, loss_fn=loss, batch=batch(240), steps=1, schedule=schedule, **asked)
    assert report.ok, str(report)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_stage_gathers_what_it_uses(recompute: str) -> None:
    """For the forward pass and for the backward pass, and keeps it over neither; a stage that uses nothing of the table
    has no part of it. Before, the first stage gathered for all, and computed the logits' gradients too."""
    compiled = autopar.compile(
        Tied(6), "pp=3,dp=2", loss_fn=loss, batch=batch(), microbatches=4, zero=3, recompute=recompute
    )
    assert compiled.pipeline is not None
    graphs, flow = compiled.pipeline.graphs, compiled.pipeline.flow
    uses = {key for key, graph in graphs.items() for _, entry in graph.entries if "head.weight" in entry.names}
    assert uses == {(0, "F"), (2, "B"), (2, "F")}
    kept = {name: flow.types[name] for work in flow.works.values() for name in (*work.reads, *work.step_reads)}
    assert [name for name, type_ in kept.items() if type_.shape == (WORDS, WIDTH)] == []
