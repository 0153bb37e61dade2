"""Plans of models of which a part is not trained, beside the programs that the compiler emits for them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import Llama, token_loss
from plan_jobs import captured, compiled_for, peaks_of, rows_of
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.machines import named
from autopar.planning.planner import Asked, layers_of, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import pipelined
from autopar.planning.price.predict import predict, rank_bytes
from autopar.planning.space.candidates import Candidate

MACHINE = named("h100-80g")
EXACT, NEAR, CUT = 1e-3, 0.03, 0.045


class LowRank(nn.Module):
    """A frozen layer, and what is trained beside it: LoRA, arXiv 2106.09685."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 32, bias=False), nn.Linear(32, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def model(kind: str) -> nn.Module:
    made = Llama(8 if kind == "first" else 6, 1024, 8, 8, 2816, 8000, 512)
    made.tokens.requires_grad_(False)
    for i, block in enumerate(made.blocks):
        if kind == "first":
            block.requires_grad_(i >= 3)
        if kind == "low rank":
            for name in ("q", "k", "v", "o", "gate", "up", "down"):
                setattr(block, name, LowRank(getattr(block, name)))
    return made


def job(kind: str, rows: int) -> autopar.Job:
    with torch.device("meta"):
        ids = torch.empty(rows, 512, dtype=torch.int64)
        return autopar.Job(model(kind), token_loss, (ids, ids), precision="bf16")


@cache
def once(kind: str, rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(kind, rows))


@cache
def layers(kind: str) -> Layers:
    return layers_of(job(kind, 2), MACHINE)


@pytest.mark.parametrize(
    ("kind", "candidate", "error"),
    [
        ("low rank", Candidate(1, 1, 1, 0, "none", 2, 2), EXACT),
        ("low rank", Candidate(2, 1, 1, 1, "none", 2, 2), EXACT),
        ("low rank", Candidate(2, 1, 1, 2, "none", 2, 2), EXACT),
        ("low rank", Candidate(2, 1, 1, 3, "none", 2, 2, reshard_after_forward=False), NEAR),
        ("low rank", Candidate(2, 1, 2, 1, "none", 2, 4), CUT), ("first", Candidate(2, 1, 1, 1, "none", 2, 4), NEAR),
        ("first", Candidate(1, 1, 2, 0, "none", 4, 4), CUT),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_takes_what_the_emitted_programs_take(kind: str, candidate: Candidate, error: float) -> None:
    """Red before: states and gradients of all parameters, up to twice the memory, and as much of AdamW's time."""
    compiled = compiled_for(once(kind, rows_of(candidate)), candidate)
    emitted = peaks_of(compiled)
    made = pipelined(candidate, layers(kind))
    assert [rank_bytes(candidate, made, i) for i in range(candidate.pp)] == pytest.approx(emitted, rel=error)
    assert predict(candidate, layers(kind), MACHINE).total == pytest.approx(compiled.time(MACHINE).total, rel=0.06)


def test_layers_that_are_frozen_are_not_equal_to_those_that_are_trained() -> None:
    assert (layers("first").equal, layers("first").first) == (4, "blocks.4")
    assert layers("low rank").equal >= 5


def test_no_bound_is_above_what_a_plan_takes() -> None:
    """A plan that fits is found where a bound that counted states of frozen parameters would have ruled out all."""
    free = planned(layers("low rank"), Asked(1, 4, MACHINE, fixed={"rows": 1, "recompute": "none"}))
    best = free.found.best[0]
    made = planned(layers("low rank"), Asked(1, 4, MACHINE, 1.01 * best.memory, {"rows": 1, "recompute": "none"}))
    assert made.found.best[0] == best
