"""Pipelines that compute some layers of each stage again: as few as let its rank fit, cut as the compiler cuts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
from models import token_loss
from plan_jobs import captured, compiled_for, llama_job, peaks_of, rows_of
from verified import Once

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.options import PLANNED
from autopar.machines import Machine, named
from autopar.planning.bounds import Bounds
from autopar.planning.layer_budget import MIXES, with_fewest
from autopar.planning.planner import Asked, Planned, candidates_of, layers_of, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import Prediction, predict
from autopar.planning.space.candidates import LAYERS, Again, Candidate
from autopar.planning.space.deal import Ranges
from autopar.planning.space.decisions import read_plan, write_plan
from autopar.planning.stage_bound import LayerCost, most_layers, stored_apart
from autopar.planning.stage_budget import Counts, Trials

MACHINE, EQUAL = named("h100-80g"), 8
NEAR = 1.01  # times the time of the best numbers of layers: where ranks have several stages, few are tried


def job(rows: int) -> autopar.Job:
    return llama_job(EQUAL, 1024, 8, 2816, 8000, 512, rows)


@cache
def once(rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(rows))


@cache
def layers() -> Layers:
    return layers_of(job(2), MACHINE)


def plan(
    ranges: Ranges, less: str, more: str, pp: int, microbatches: int, schedule: str = "1f1b", chunks: int = 1,
    dp: int = 1, tp: int = 1, zero: int = 0,
) -> Candidate:  # fmt: skip
    again = Again("blocks.0", EQUAL, ranges, more, less)
    return Candidate(
        dp, tp, pp, zero, LAYERS, 1, microbatches, schedule, sequence=tp > 1, chunks=chunks, again=again
    )  # fmt: skip


@pytest.mark.parametrize(
    ("candidate", "memory"),
    [
        (plan(((0, 3), (5, 6)), "none", "selective", 2, 4), 0.01),
        (plan(((0, 2), (4, 5)), "none", "selective", 2, 4, "interleaved-1f1b", 2), 0.03),
        (plan(((0, 3),), "none", "selective", 4, 8, "zb-h1"), 0.04),
        (plan(((0, 2), (6, 7)), "none", "full", 2, 4, "zb-v", 2), 0.03),
        (plan(((0, 3),), "selective", "full", 2, 4, dp=2, zero=3), 0.03),
        (plan(((0, 2), (4, 5)), "none", "selective", 2, 4, tp=2), 0.04),
        (plan(((0, 3),), "none", "full", 4, 8, dp=2, zero=1), 0.03),
    ],
    ids=str,
)  # fmt: skip
def test_the_emitted_programs_take_as_much(candidate: Candidate, memory: float) -> None:
    """Cut by the times of layers of which some take longer, as the compiler cuts them."""
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    made = predict(candidate, layers(), MACHINE)
    assert made.total == pytest.approx(compiled.time(MACHINE).total, rel=0.05)
    emitted = max(peaks_of(compiled))
    assert made.memory == pytest.approx(emitted, rel=memory)


# -- the search -----------------------------------------------------------------------------------------------------


def every(mix: Candidate) -> list[Prediction]:
    """With every number of layers of each stage."""
    trials, stages = Trials(mix, layers(), MACHINE, 0.0), mix.pp * mix.chunks
    counts = product(range(EQUAL // stages + 3), repeat=stages)
    candidates = dict.fromkeys(_settled(trials, each) for each in counts)
    return [predict(candidate, layers(), MACHINE) for candidate in candidates]


def _settled(trials: Trials, counts: Counts) -> Candidate:
    """With as many layers of the stages that come of them, if a few cuts find these."""
    made = trials.tried((0,) * len(counts), (0,) * (len(counts) + 1))
    for _ in range(8):
        starts = made.starts
        made = trials.tried(counts, starts)
        if made.starts == starts:
            break
    return made.candidate


def limits(made: list[Prediction], first: float = 0.3) -> list[float]:
    least, most = min(each.memory for each in made), max(each.memory for each in made)
    return [least + (most - least) * share for share in (0.3, 0.5, 0.7, 0.9) if share >= first]


@pytest.mark.parametrize(("less", "more"), MIXES)
@pytest.mark.parametrize(
    ("pp", "schedule", "chunks", "near", "first"),
    [
        (2, "1f1b", 1, 1.0001, 0.3), (4, "1f1b", 1, 1.0001, 0.3), (2, "interleaved-1f1b", 2, NEAR, 0.3),
        (2, "zb-v", 2, NEAR, 0.5),
    ],
)  # fmt: skip
def test_as_few_layers_as_fit(
    less: str, more: str, pp: int, schedule: str, chunks: int, near: float, first: float
) -> None:
    """first: the least memory, from that of the smallest plan to that of the largest. Of zb-v in less memory, where
    only another stage's layers move the cut far enough, none is found."""
    mix = plan((), less, more, pp, 2 * pp, schedule, chunks)
    tried = every(mix)
    before = predict(mix, layers(), MACHINE).memory
    for limit in (each for each in limits(tried, first) if each < before):
        best = min((each for each in tried if each.memory <= limit), key=lambda each: each.total)
        found = Trials(mix, layers(), MACHINE, limit).fewest()
        assert found.memory <= limit
        assert found.total <= best.total * near, (best.candidate.ranges, found.candidate.ranges)


GPUS, ROWS = 2, 4
FEW = {"tp": 1, "cp": 1, "rows": 1, "pp": 2, "schedule": "1f1b"}


@cache
def small_layers() -> Layers:
    return layers_of(llama_job(6, 128, 4, 256, 64, 256, 2), SMALL)


SMALL = Machine.flat(1e6, 1e5, 1e3, 2.0, 1.0)
SOME = Candidate(1, 1, 2, 0, LAYERS, 1, 4, again=Again("blocks.0", 6))


def every_small() -> list[Prediction]:
    """With every number of layers of both stages, of all mixes."""
    found = []
    for less, more in MIXES:
        trials = Trials(SOME._replace(again=replace(SOME.again, less=less, more=more)), small_layers(), SMALL, 0.0)
        candidates = dict.fromkeys(_settled(trials, counts) for counts in product(range(6), repeat=2))
        found += [predict(candidate, small_layers(), SMALL) for candidate in candidates if candidate.ranges]
    return found


def planned_for(limit: float, **fixed: object) -> Planned:
    return planned(small_layers(), Asked(GPUS, ROWS, SMALL, limit, {**FEW, **fixed}, 2))


def test_the_search_finds_what_trying_everything_finds() -> None:
    tried = every_small()
    for limit in limits(tried):
        fixed = planned_for(limit)
        bounds = Bounds(small_layers(), fixed.work, SMALL, 6)
        bounds.limit = limit
        fitting = [each for each in tried if each.memory <= limit]
        for made in fitting:
            assert all(bound(SOME) <= made.total * (1 + 1e-9) for bound in bounds.steps), made
            assert bounds.memory(SOME) <= made.memory and not bounds.is_larger(SOME, made.memory), made
        uniform = [each for each in candidates_of(fixed.asked, fixed.model) if each.again is None]
        others = [made for each in uniform if (made := predict(each, small_layers(), SMALL)).memory <= limit]
        best = min(each.total for each in (*fitting, *others))
        assert fixed.found.best[0].total == pytest.approx(best), "the fastest ones are refined"
        small = {each.candidate.recompute for each in others}
        assert sum(fixed.found.counts.values()) == len(uniform)
        assert (fixed.found.refined > 0) == ("none" not in small), "or nothing needs to be computed again"
        mixes = [each.total for each in fitting if each.candidate.again.less not in small]
        if "none" not in small:
            asked = planned_for(limit, recompute=LAYERS)
            assert asked.found.best[0].total == pytest.approx(min(mixes)), "where the less of two policies fits, none"
            assert sum(asked.found.counts.values()) == 1
        for slowest in (best * 1.001, best * 1.1):  # a bound that knows what is to be beaten removes none that does
            bounds.slowest = slowest
            faster = [made.total for made in fitting if made.total < slowest]
            assert all(bound(SOME) <= total * (1 + 1e-9) for bound in bounds.steps for total in faster)


def test_the_first_stages_compute_more_again() -> None:
    """They hold the most micro-batches."""
    mix = plan((), "none", "selective", 4, 8)
    none, full = (predict(mix._replace(recompute=r, again=None), layers(), MACHINE).memory for r in ("none", "full"))
    found = Trials(mix, layers(), MACHINE, (2 * none + full) / 3).fewest()
    ranges = found.candidate.ranges
    assert ranges and ranges[0][0] == 0 and all(a[1] < b[0] for a, b in pairwise(ranges))
    assert sum(end - begin for begin, end in ranges) < EQUAL / 2


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    tried = every_small()
    made = planned_for(limits(tried)[2], recompute=LAYERS).found.best[0]
    candidate, file = made.candidate, tmp_path / "plan.toml"
    assert candidate.again is not None and candidate.pp == 2 and candidate.ranges
    found = with_fewest(SOME, small_layers(), SMALL, made.memory)
    assert found is not None and found.again == candidate.again
    write_plan(file, candidate.mesh, candidate.options())
    read = read_plan(file)
    assert read.step == {**PLANNED, **candidate.options()}
    given = llama_job(6, 128, 4, 256, 64, 256, ROWS)
    compiled = autopar.compile(
        given.model, read.mesh, loss_fn=token_loss, batch=given.batch, precision="bf16", **read.step
    )
    assert made.total == pytest.approx(compiled.time(SMALL).total, rel=0.05)


def test_how_many_layers_fit_wherever_cuts_lie() -> None:
    """Of 1F1B the first of two ranks has two micro-batches under way, the other one: a layer takes 7 bytes, and 4."""
    one, layer = SOME._replace(recompute="none", again=None), LayerCost(1.0, 0.0, 3.0, 0.0, 1.0, 0.0)
    assert most_layers(one, layer, 0.0, 14.0) == 14 / 7 + 14 / 4
    assert most_layers(one, layer, 0.5, 14.0) == 14.5 / 7 + 14.5 / 4, "half of what is stored may lie on another rank"
    layers_ = small_layers()
    near, cost = one.split.near, layers_.cost(one.split.near, one.rows, "none")
    own = LayerCost.of(one, cost, 0.0, 0.0)
    cut = stored_apart(layers_.sections(near, one.rows, "none", Mesh(one.axes)).layer)
    least = Bounds(layers_, planned_for(math.inf).work, SMALL, 6).held(one)
    assert most_layers(one, own, cut, least) >= 6 > most_layers(one, own, cut, least / 2)
