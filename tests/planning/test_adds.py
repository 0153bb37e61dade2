"""A later micro-batch reads the gradients that it adds to; the only one does not, nor one that scatters its own."""

from __future__ import annotations

from functools import cache

import pytest
from models import token_loss
from plan_jobs import llama_job

import autopar
from autopar.machines import named
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import predict
from autopar.planning.space.candidates import Candidate

MACHINE = named("h100-80g")
SIZES = (4, 1024, 8, 2816, 8000, 512)  # so many weights for so few rows that the sums show


@cache
def layers() -> Layers:
    return layers_of(llama_job(*SIZES, 2), MACHINE)


@pytest.mark.parametrize(
    ("candidate", "adds"),
    [
        (Candidate(1, 1, 1, 0, "none", 4, 1), False), (Candidate(1, 1, 1, 0, "none", 1, 4), True),
        (Candidate(1, 1, 2, 0, "none", 1, 4), True),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_is_predicted_as_it_is_emitted(candidate: Candidate, adds: bool) -> None:
    given = llama_job(*SIZES, candidate.rows * candidate.microbatches)
    compiled = autopar.compile(
        given.model, candidate.mesh, loss_fn=token_loss, batch=given.batch, precision="bf16", **candidate.options()
    )
    found, emitted = predict(candidate, layers(), MACHINE).total, compiled.time(MACHINE).total
    assert candidate.adds == adds and found == pytest.approx(emitted, rel=0.012)
    cost = layers().cost(candidate.split, candidate.rows, "none")
    read = sum(each.numel() for each in given.model.parameters()) * 4 / MACHINE.device.bandwidth * 1e6
    assert read < cost.adds(layers().equal) < 2 * read, "the sums in float32, once"
    assert cost.backward(4) - cost.alone.backward(4) == pytest.approx(cost.adds(4))


def test_what_is_scattered_first_is_a_part() -> None:
    assert [Candidate(2, 1, 1, zero, "none", 1, 4).adds for zero in range(4)] == [True, True, False, False]


def test_layers_that_compute_more_again_add_to_nothing_either() -> None:
    cost = layers().cost(Candidate(1, 1, 1, 0, "none", 1, 4).split, 1, "none", more="selective")
    assert cost.again is not None and cost.again.adds.each > 0
    alone = cost.alone.again
    assert alone is not None and alone.adds.each == 0 and alone.backward.each < cost.again.backward.each
