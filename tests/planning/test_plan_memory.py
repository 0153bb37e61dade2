"""The memory that a plan says it takes, against that of the programs that the compiler emits for it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import Llama, token_loss

import autopar
from autopar.machines import named
from autopar.planning.candidates import Candidate
from autopar.planning.layers import Layers
from autopar.planning.pipelined import pipelined
from autopar.planning.plan import layers_of
from autopar.planning.predict import predict
from autopar.planning.rank_memory import rank_bytes

MACHINE = named("h100-80g")
EXACT, NEAR = 1e-3, 0.04  # ZeRO-3 and gradients that leave as parts of larger values are not said to the byte
CUT = 0.03  # stages are cut inside layers
SCATTERED = 0.05  # of gradients on their way, those of two buckets are counted
TIED = 0.13  # the first stage is said to hold two gradients of a tied embedding more than it does


def job(rows: int, is_tied: bool = False) -> autopar.Job:
    with torch.device("meta"):
        model = Llama(8, 1024, 8, 8, 2816, 32000, 512)
        if is_tied:
            model.head.weight = model.tokens.weight
        ids = torch.empty(rows, 512, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


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
    ],
    ids=str,
)  # fmt: skip
def test_memory_is_that_of_the_emitted_programs(candidate: Candidate, error: float) -> None:
    given = job(candidate.dp * candidate.fsdp * candidate.rows * candidate.microbatches)
    compiled = autopar.compile(
        given.model, candidate.mesh, loss_fn=token_loss, batch=given.batch, precision="bf16", **candidate.options()
    )
    emitted = max(compiled.memory(ranks[0], device="cuda").peak for ranks in compiled.alike)
    assert predict(candidate, layers(), MACHINE).memory == pytest.approx(emitted, rel=error)


def test_a_tied_embedding_lies_on_the_first_stage() -> None:
    """Red before: it was counted on the last one, so that no rank was said to hold what the first one does."""
    candidate, given = Candidate(1, 1, 2, 0, "none", 2, 4), job(8, is_tied=True)
    compiled = autopar.compile(
        given.model, candidate.mesh, loss_fn=token_loss, batch=given.batch, precision="bf16", **candidate.options()
    )
    emitted = [compiled.memory(ranks[0], device="cuda").peak for ranks in compiled.alike]
    made = pipelined(candidate, layers_of(given, MACHINE))
    assert [rank_bytes(candidate, made, rank) for rank in (0, 1)] == pytest.approx(emitted, rel=TIED)
