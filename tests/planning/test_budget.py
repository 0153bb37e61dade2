"""Plans that compute some of the layers again: as few as the memory asks for, and what that takes is true."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from models import token_loss
from plan_jobs import llama_job
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.options import PLANNED
from autopar.machines import Machine
from autopar.planning import layer_budget
from autopar.planning.bounds import Bounds
from autopar.planning.find_plan import SAME
from autopar.planning.layer_budget import MIXES, with_fewest
from autopar.planning.others import frontier
from autopar.planning.planner import Asked, Planned, candidates_of, layers_of, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import Prediction, predict
from autopar.planning.space.candidates import LAYERS, Again, Candidate, Model, Space
from autopar.planning.space.decisions import read_plan, write_plan

MACHINE = Machine.flat(1e6, 1e5, 1e3, 2.0, 1.0)
LENGTH, EQUAL, ROWS = 256, 6, 4
FEW = {"tp": 1, "cp": 1, "rows": 1}  # so that there are few programs to make
SOME = Candidate(2, 1, 1, 1, LAYERS, 1, 2, again=Again("blocks.0", EQUAL))


def job(rows: int = 2) -> autopar.Job:
    return llama_job(EQUAL, 128, 4, 256, 64, LENGTH, rows)


@cache
def layers() -> Layers:
    """Of all plans of this file: each program is made once."""
    return layers_of(job(), MACHINE)


def predicted(candidate: Candidate) -> Prediction:
    return predict(candidate, layers(), MACHINE)


def with_count(count: int, of: Candidate = SOME) -> Prediction:
    """The ends are one policy for all layers."""
    assert of.again is not None
    ends = {0: of.again.less, EQUAL: of.again.more}
    again = None if count in ends else replace(of.again, ranges=((0, count),))
    return predicted(of._replace(recompute=ends.get(count, LAYERS), again=again))


def mixed(less: str, more: str, of: Candidate = SOME) -> Candidate:
    assert of.again is not None
    return of._replace(again=replace(of.again, less=less, more=more))


@pytest.mark.parametrize(("less", "more"), MIXES)
def test_each_layer_takes_time_and_leaves_memory(less: str, more: str) -> None:
    made = [with_count(count, mixed(less, more)) for count in range(EQUAL + 1)]
    assert all(a.total < b.total for a, b in pairwise(made)), made
    assert all(a.memory > b.memory for a, b in pairwise(made[:EQUAL])), "the last layer may hold more than it keeps"
    assert made[1].total - made[0].total == pytest.approx((made[-1].total - made[0].total) / EQUAL, rel=0.05)


@pytest.mark.parametrize(("less", "more"), MIXES)
def test_as_few_layers_as_fit(less: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_budget, "MIXES", ((less, more),))
    mix = mixed(less, more)
    for count in range(1, EQUAL):
        limit = with_count(count, mix).memory
        for room in (limit, (limit + with_count(count - 1, mix).memory) / 2):
            found = with_fewest(SOME, layers(), MACHINE, room)
            assert found is not None and found.again is not None and found.again.count == count
            assert predicted(found).memory <= room < with_count(count - 1, mix).memory


def test_where_no_number_of_layers_is_a_plan() -> None:
    assert with_fewest(SOME, layers(), MACHINE, with_count(0).memory) is None
    least, every = with_fewest(SOME, layers(), MACHINE, 1.0), [mixed(*mix) for mix in MIXES]
    assert least is not None
    assert predicted(least).memory == min(with_count(i, mix).memory for mix in every for i in range(1, EQUAL))


@pytest.mark.parametrize(("less", "more", "count"), [(*MIXES[0], 2), (*MIXES[1], 3), (*MIXES[2], 1), (*MIXES[2], 5)])
def test_the_emitted_programs_take_as_much(less: str, more: str, count: int) -> None:
    made, given = with_count(count, mixed(less, more)), job(ROWS)
    plan = made.candidate
    compiled = autopar.compile(
        given.model, plan.mesh, loss_fn=token_loss, batch=given.batch, precision="bf16", **plan.options()
    )
    assert plan.options()["recompute"] == {f"blocks.0-{count - 1}": more, "*": less}
    assert made.total == pytest.approx(compiled.time(MACHINE).total, rel=0.05)
    assert made.memory == pytest.approx(compiled.memory(0, device="cuda").peak, rel=0.04)


# -- the search -----------------------------------------------------------------------------------------------------


def planned_for(limit: float, **fixed: object) -> Planned:
    return planned(layers(), Asked(2, ROWS, MACHINE, limit, {**FEW, **fixed}, 3))


def middle() -> float:
    """Of the plan that holds least with most of its layers computed again."""
    least = SOME._replace(zero=3)
    return (with_count(4, least).memory + with_count(5, least).memory) / 2


@pytest.fixture(scope="module")
def found() -> Planned:
    """Without pipelines: of these the fastest mixes are tried alone (`search._refine`)."""
    return planned_for(middle(), pp=1)


def test_the_search_finds_what_trying_everything_finds(found: Planned) -> None:
    """Every number of layers too."""
    bounds, candidates = Bounds(layers(), found.work, MACHINE, EQUAL), candidates_of(found.asked, found.model)
    within, tried = Bounds(layers(), found.work, MACHINE, EQUAL), list[Prediction]()
    within.limit = middle()
    for each in candidates:
        for made in _each_way(each):
            assert all(bound(each) <= made.total * (1 + 1e-9) for bound in bounds.steps), made
            assert bounds.memory(each) <= made.memory * (1 + 1e-9), made
            assert not bounds.is_larger(each, made.memory * (1 + 1e-9)), each
            if made.memory <= middle():
                assert max(within.near(each), within.calls(each)) <= made.total * (1 + 1e-9), made
                assert not within.is_larger(each, middle()), made
                tried.append(made)
    tried.sort(key=lambda each: each.total)
    best = found.found.best
    assert best[0].candidate.again is not None and best[0].total == pytest.approx(tried[0].total)
    assert [each.total for each in best] == pytest.approx([each.total for each in _one_of_each(tried)[:3]])
    assert sum(found.found.counts.values()) == len(candidates)
    assert sum(each.again is not None for each in candidates) == len(candidates) / 4, "with each other choice"


def _each_way(candidate: Candidate) -> list[Prediction]:
    """With every number of layers, of all mixes."""
    if candidate.again is None:
        return [predicted(candidate)]
    return [with_count(count, mixed(*mix, candidate)) for mix in MIXES for count in range(1, EQUAL)]


def _one_of_each(made: list[Prediction]) -> list[Prediction]:
    """Of plans that differ in what of the layers is computed again alone, the first."""
    first: dict[Candidate, Prediction] = {}
    for each in made:
        first.setdefault(each.candidate._replace(again=None), each)
    return list(first.values())


def test_nothing_is_computed_again_where_all_fits() -> None:
    made = planned_for(math.inf, pp=1)
    assert {each.candidate.again for each in made.found.best} == {None}
    counts = made.found.counts
    assert counts[SAME] and sum(counts.values()) == len(candidates_of(made.asked, made.model))


def test_the_frontier_goes_on_with_more_layers() -> None:
    line = frontier(planned_for(math.inf, pp=1, zero=1))
    mixes = {each.candidate.again for each in line} - {None}
    assert len(mixes) > 1 and all(a.total < b.total and a.memory > b.memory for a, b in pairwise(line)), line


def test_what_is_fixed(found: Planned) -> None:
    made = planned_for(middle(), recompute=LAYERS, pp=1)
    assert made.found.best[0] == found.found.best[0]
    with pytest.raises(PlanError, match=r"recompute=layers: \d+ fit in inf .* Write recompute=none, or less memory"):
        planned_for(math.inf, recompute=LAYERS)
    with pytest.raises(
        PlanError, match=r"no plan fits in .*, with dp=2 zero=[13] recompute 5 of 6 layers, selective others "
    ):
        planned_for(1e3, recompute=LAYERS, pp=1)


# -- as a plan is written -------------------------------------------------------------------------------------------


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, plan = tmp_path / "plan.toml", with_count(3).candidate
    assert str(plan) == "dp=2 zero=1 recompute 3 of 6 layers 2 x 1 rows"
    write_plan(file, plan.mesh, plan.options())
    read = read_plan(file)
    assert read.step == {**PLANNED, **plan.options()} and read.step["recompute"]["blocks.0-2"] == "full"


def test_layers_of_a_sequence_and_behind_others() -> None:
    assert Again("3", 8, ((0, 2),)).policies == {"3-4": "full", "*": "none"}
    assert Again("model.layers.1", 30, ((0, 1),)).policies == {"model.layers.1-1": "full", "*": "none"}
    for model in (Model(1, first="blocks.0"), Model(0)):
        assert LAYERS not in {each.recompute for each in Space(4, 4, 8, model, {}).candidates()}
    blocks = nn.Sequential(nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)))
    given = layers_of(autopar.Job(blocks, lambda model, x: model(x).sum(), torch.randn(4, 8)), MACHINE)
    again = Again(given.first, given.equal, ((0, 2),))
    autopar.compile(
        blocks, "dp=1", loss_fn=lambda model, x: model(x).sum(), batch=torch.randn(4, 8), recompute=again.policies
    )
    assert given.first in ("1", "2")
