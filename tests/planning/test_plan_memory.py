"""The memory that a plan says it takes, against that of the programs that the compiler emits for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import Llama, token_loss
from plan_jobs import captured, compiled_for, peaks_of, rows_of
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.machines import named
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import pipelined, without_messages
from autopar.planning.price.predict import predict, rank_bytes
from autopar.planning.space.candidates import Candidate

MACHINE = named("h100-80g")
EXACT, NEAR = 1e-3, 0.04  # ZeRO-3 and gradients that leave as parts of larger values are not said to the byte
CUT = 0.03  # stages are cut inside layers
SCATTERED = 0.05  # of gradients on their way, those of two buckets are counted
APART = 0.075  # where what scatters, gathers and gradients of weights hold at once is not said to the moment
TIED = 0.017  # of ranks of a pipeline: when the last stage's gradient of the table comes is said by rule of thumb


def job(rows: int, is_tied: bool = False, precision: str | None = "bf16") -> autopar.Job:
    with torch.device("meta"):
        model = Llama(8, 1024, 8, 8, 2816, 32000, 512)
        if is_tied:
            model.head.weight = model.tokens.weight
        ids = torch.empty(rows, 512, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision=precision)


@cache
def once(make: Callable[..., autopar.Job], *args: Any) -> Once:
    return captured(make(*args))


@cache
def layers() -> Layers:
    return layers_of(job(2), MACHINE)


@pytest.mark.parametrize(
    ("candidate", "error"),
    [
        (Candidate(1, 1, 1, 0, "none", 2, 2), EXACT), (Candidate(2, 1, 1, 0, "none", 1, 2), EXACT),
        (Candidate(2, 1, 1, 1, "none", 2, 2), EXACT), (Candidate(2, 1, 1, 2, "none", 2, 2), NEAR),
        (Candidate(2, 1, 1, 3, "none", 2, 2, reshard_after_forward=False), NEAR),
        (Candidate(2, 1, 1, 3, "none", 2, 2), NEAR), (Candidate(2, 1, 1, 3, "none", 2, 1), NEAR),
        (Candidate(1, 2, 1, 0, "full", 2, 2, sequence=True), NEAR), (Candidate(1, 2, 1, 0, "selective", 2, 2), NEAR),
        (Candidate(1, 2, 1, 0, "none", 2, 1, sequence=True), NEAR), (Candidate(1, 1, 2, 0, "none", 2, 4), CUT),
        (Candidate(1, 1, 4, 0, "none", 1, 8), CUT), (Candidate(2, 1, 2, 2, "none", 1, 4), SCATTERED),
        (Candidate(2, 1, 2, 3, "none", 1, 4), CUT),
        (Candidate(2, 1, 1, 1, "none", 2, 2, fsdp=2), EXACT), (Candidate(2, 1, 1, 1, "none", 1, 2, cp=2), NEAR),
        (Candidate(1, 1, 4, 0, "none", 1, 8, "zb-h1"), NEAR), (Candidate(1, 1, 2, 0, "none", 1, 6, "zb-h2"), CUT),
        (Candidate(1, 1, 2, 0, "none", 1, 6, "zb-v", chunks=2), CUT),
        (Candidate(2, 1, 1, 3, "stage+full", 2, 2), EXACT), (Candidate(1, 1, 4, 0, "stage", 1, 8), EXACT),
    ],
    ids=str,
)  # fmt: skip
def test_memory_is_that_of_the_emitted_programs(candidate: Candidate, error: float) -> None:
    compiled = compiled_for(once(job, rows_of(candidate)), candidate)
    peak = max(peaks_of(compiled))
    assert predict(candidate, layers(), MACHINE).memory == pytest.approx(peak, rel=error)


@cache
def tied_layers(precision: str | None) -> Layers:
    return layers_of(job(2, is_tied=True, precision=precision), MACHINE)


@pytest.mark.parametrize(
    ("candidate", "precision", "error"),
    [
        (Candidate(1, 1, 1, 0, "none", 2, 2), "bf16", EXACT), (Candidate(1, 1, 1, 0, "none", 1, 2), None, EXACT),
        (Candidate(2, 1, 1, 1, "none", 2, 2), "bf16", EXACT), (Candidate(2, 1, 1, 2, "none", 2, 2), "bf16", SCATTERED),
        (Candidate(2, 1, 1, 3, "none", 2, 2), "bf16", NEAR), (Candidate(1, 1, 2, 0, "none", 2, 4), "bf16", TIED),
        (Candidate(2, 1, 2, 1, "none", 1, 4), "bf16", TIED), (Candidate(2, 1, 2, 1, "none", 1, 4), None, SCATTERED),
        (Candidate(1, 1, 2, 0, "none", 1, 4, "interleaved-1f1b", chunks=2), "bf16", NEAR),
        (Candidate(2, 1, 2, 2, "none", 1, 4), "bf16", NEAR), (Candidate(2, 1, 2, 3, "none", 1, 4), "bf16", NEAR),
        (Candidate(2, 1, 2, 2, "none", 1, 4, "zb-h1"), "bf16", SCATTERED),
        (Candidate(2, 1, 2, 3, "none", 1, 4, "zb-h1"), "bf16", APART),
        (Candidate(2, 1, 2, 2, "none", 1, 4), None, APART), (Candidate(2, 1, 2, 3, "none", 1, 4), None, APART),
        (Candidate(2, 1, 4, 2, "none", 1, 8), "bf16", NEAR),
    ],
    ids=str,
)  # fmt: skip
def test_a_tied_embedding(candidate: Candidate, precision: str | None, error: float) -> None:
    """On every rank: the first keeps the table; the last has a copy of it, or with ZeRO-3 of its part, and adds up and
    scatters a gradient of its own. Red before: 6 to 15 % too much without a pipeline, 13 % too much on the first stage
    and 10 % too little on the last; with ZeRO-2 and ZeRO-3 up to 14 % too much and 24 % too little."""
    compiled = compiled_for(once(job, rows_of(candidate), True, precision), candidate)
    peaks = peaks_of(compiled)
    made = pipelined(candidate, tied_layers(precision))
    assert [rank_bytes(candidate, made, i) for i in range(candidate.pp)] == pytest.approx(peaks, rel=error)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "gpipe"])
def test_what_holds_too_much_without_messages_does_with_them(schedule: str) -> None:
    """The plan is left out then, and no messages are drawn."""
    for microbatches in (4, 9, 20):
        one = Candidate(1, 1, 4, 0, "none", 1, microbatches, schedule)
        alone, made = (make(one, tied_layers(None)) for make in (without_messages, pipelined))
        for rank in range(one.pp):
            assert rank_bytes(one, alone, rank) <= rank_bytes(one, made, rank)


SMALL = 0.005  # where schedules are drawn with other times, and in the last turns
HALVES = 0.03  # where gradients of weights are computed apart: what waits for them is said of whole layers
MOVED = 0.16  # of one layer, that its gradients are on their way when it has let go of what it saved is not said


def small(rows: int) -> autopar.Job:
    """Tables take little of it, and a stage has one layer or two."""
    with torch.device("meta"):
        model = Llama(4, 256, 8, 8, 704, 256, 1024)
        ids = torch.empty(rows, 1024, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


@pytest.mark.parametrize(
    ("candidate", "low", "high"),
    [
        (Candidate(1, 1, 4, 0, "none", 1, 8), SMALL, SMALL), (Candidate(1, 1, 4, 0, "none", 1, 4), CUT, SMALL),
        (Candidate(1, 1, 2, 0, "none", 2, 4), SMALL, SMALL), (Candidate(2, 1, 4, 1, "none", 1, 8), SMALL, SMALL),
        (Candidate(1, 1, 4, 0, "full", 1, 8), SMALL, SMALL), (Candidate(1, 1, 4, 0, "selective", 1, 8), SMALL, CUT),
        (Candidate(1, 1, 4, 0, "none", 1, 8, "gpipe"), CUT, SMALL),
        (Candidate(1, 1, 2, 0, "none", 1, 8, "interleaved-1f1b", chunks=2), SMALL, SMALL),
        (Candidate(1, 1, 4, 0, "none", 2, 8, "zb-h1"), CUT, HALVES),
        (Candidate(1, 1, 4, 0, "none", 1, 8, "zb-h2"), CUT, HALVES),
        (Candidate(1, 1, 2, 0, "none", 1, 8, "zb-v", chunks=2), HALVES, HALVES),
        (Candidate(2, 1, 4, 2, "none", 1, 8), SMALL, MOVED), (Candidate(2, 1, 4, 3, "none", 1, 8), SMALL, MOVED),
        (Candidate(2, 1, 2, 2, "none", 1, 4), SMALL, MOVED), (Candidate(2, 1, 2, 3, "none", 1, 4), SMALL, MOVED),
    ],
    ids=str,
)  # fmt: skip
def test_short_stages(candidate: Candidate, low: float, high: float) -> None:
    """On every rank, by how much of it too little and too much is said at most. Red before: what a stage sends was
    counted there and where it came, messages on their way by rule of thumb, buffers not at all: up to 8 % too much
    and 4 % too little, with ZeRO-3 17 % too much."""
    compiled = compiled_for(once(small, rows_of(candidate)), candidate)
    made = pipelined(candidate, small_layers())
    for i, peak in enumerate(peaks_of(compiled)):
        assert (1 - low) * peak <= rank_bytes(candidate, made, i) <= (1 + high) * peak, i


@cache
def small_layers() -> Layers:
    return layers_of(small(2), MACHINE)


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@pytest.mark.parametrize("depth", [8, 16])
def test_a_model_that_is_a_list_itself(depth: int) -> None:
    """Red before: its layers have no name before their number, so one of three was none and all others kept nothing."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(depth)))
        batch = torch.empty(4, 512, 128), torch.empty(4, 512, 128)
    of = layers_of(autopar.Job(model, squares, batch), MACHINE)
    one = Candidate(1, 1, 1, 0, "none", 4, 1)
    compiled = autopar.compile(model, "dp=1", loss_fn=squares, batch=batch)
    # one value: the constant gradient of a mean, that a step of several micro-batches makes once
    assert predict(one, of, MACHINE).memory == pytest.approx(compiled.memory().peak, abs=1.01 * batch[0].nbytes)


class ByViews(nn.Module):
    """A layer whose products read their weights by a view: of their own, and as transformers' stacked experts do."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Parameter(torch.empty(width, width)), nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.wide = nn.Parameter(torch.empty(experts, 3 * width, width))
        self.narrow = nn.Parameter(torch.empty(experts, width, 3 * width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(x) @ self.up.t())
        weight, best = self.gate(h).softmax(-1).max(-1)
        order = best.flatten().argsort()
        ends = best.flatten().bincount(minlength=len(self.wide)).cumsum(0).to(torch.int32)
        rows = h.flatten(0, 1)[order]
        found = torch.relu(nn.functional.grouped_mm(rows, self.wide.transpose(-2, -1), offs=ends))
        found = nn.functional.grouped_mm(found, self.narrow.transpose(-2, -1), offs=ends)
        return x + found[order.argsort()].view_as(x) * weight[..., None]


def viewed(rows: int) -> autopar.Job:
    with torch.device("meta"):
        model = nn.Sequential(*(ByViews(512, 8) for _ in range(6)))
        batch = torch.empty(rows, 1024, 512), torch.empty(rows, 1024, 512)
    return autopar.Job(model, squares, batch, precision="bf16")


@cache
def viewed_layers() -> Layers:
    return layers_of(viewed(2), MACHINE)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(4, 1, 1, 3, "none", 2, 2), Candidate(4, 1, 1, 3, "none", 4, 1), Candidate(4, 1, 1, 2, "none", 2, 2),
        Candidate(4, 1, 1, 0, "none", 2, 1),
    ],
    ids=str,
)  # fmt: skip
def test_weights_that_are_read_by_views(candidate: Candidate) -> None:
    """Red before: 9 to 11 % too little with ZeRO-2 and ZeRO-3. Weights were said to come when a graph makes their
    views, as it begins; gradients that leave by a view were in none of the buckets."""
    compiled = compiled_for(once(viewed, rows_of(candidate)), candidate)
    assert predict(candidate, viewed_layers(), MACHINE).memory == pytest.approx(
        compiled.memory(device="cuda").peak, rel=0.02
    )
