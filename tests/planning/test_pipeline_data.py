"""Pipelines with ZeRO-2 and ZeRO-3: what each micro-batch moves over the data axes, beside the emitted programs."""

from __future__ import annotations

from functools import cache

import pytest
from plan_jobs import captured, compiled_for, llama_job, peaks_of, rows_of
from verified import Once

import autopar
from autopar.machines import named
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import predict
from autopar.planning.space.candidates import Candidate

MACHINE = named("h100-80g")
NEAR, FULL = 0.04, 0.08  # of the time, and of the memory: where gradients of weights are apart too much is said


def job(rows: int) -> autopar.Job:
    """Of so few rows that little hides what is moved."""
    return llama_job(6, 1536, 12, 4096, 64000, 512, rows)


@cache
def once(rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(rows))


@cache
def layers() -> Layers:
    return layers_of(job(2), MACHINE)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, 1, 2, 2, "none", 1, 4), Candidate(2, 1, 2, 3, "none", 1, 4),
        Candidate(8, 1, 2, 2, "none", 1, 4, "zb-h1"), Candidate(2, 1, 2, 3, "none", 1, 4, "zb-v", chunks=2),
        Candidate(2, 1, 2, 3, "none", 1, 4, fsdp=2),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_is_predicted_as_it_is_emitted(candidate: Candidate) -> None:
    """Red before: 14, 27, 25, 25 and 27 % too short."""
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    found = predict(candidate, layers(), MACHINE)
    assert found.total == pytest.approx(compiled.time(MACHINE).total, rel=NEAR)
    emitted = max(peaks_of(compiled))
    assert found.memory == pytest.approx(emitted, rel=FULL)
