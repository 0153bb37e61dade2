"""Plans for cores, which launch each call themselves before they compute it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from plan_jobs import captured, compiled_for, llama_job, on_same_captures, rows_of
from verified import Once

import autopar
from autopar.machines import Machine, named
from autopar.planning.bounds import Bounds, LeastWork
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import predict
from autopar.planning.space.candidates import Candidate

LAUNCH = 200.0  # us
NEAR, CUT = 0.03, 0.04  # where the compiler cuts one small weight from where the planner does, -3.5 %


def machine(launch: float) -> Machine:
    return replace(named("cpu"), launch_us=launch)


def job(rows: int) -> autopar.Job:
    return llama_job(4, 64, 2, 128, 256, 32, rows)


@cache
def once(rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(rows))


@cache
def layers(launch: float) -> Layers:
    return layers_of(job(2), machine(launch)) if launch == LAUNCH else on_same_captures(layers(LAUNCH), machine(launch))


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, 1, 1, 0, "none", 2, 4), Candidate(1, 2, 1, 0, "none", 2, 2), Candidate(1, 1, 2, 0, "none", 2, 4),
        Candidate(2, 1, 2, 2, "none", 1, 4), Candidate(2, 1, 2, 3, "none", 1, 4, "zb-h1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_is_predicted_as_it_is_emitted(candidate: Candidate) -> None:
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    found, quick = (predict(candidate, layers(us), machine(us)).total for us in (LAUNCH, 0.0))
    emitted, before = (compiled.time(machine(us)).total for us in (LAUNCH, 0.0))
    near = CUT if candidate.halves else NEAR
    assert found == pytest.approx(emitted, rel=near)
    assert found - quick == pytest.approx(emitted - before, rel=near) and emitted > 2 * before
    bounds = Bounds(layers(LAUNCH), LeastWork(0.0, 0.0, 0.0, "float32"), machine(LAUNCH), layers(LAUNCH).equal)
    assert all(bound(candidate) <= found for bound in bounds.steps)
