"""Plans with an axis `ulysses` beside cp: where it is drawn, what is predicted of it, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import Llama, token_loss
from plan_jobs import captured, on_same_captures, peaks_of
from verified import Once

import autopar
from autopar.compiled import Compiled
from autopar.errors import LayoutError, PlanError
from autopar.ir.plan import Fixed
from autopar.machines import Machine, named
from autopar.machines.model import RankGroup
from autopar.passes.search.heads import head_splits
from autopar.planning.bounds import Bounds
from autopar.planning.jobs import layers_of
from autopar.planning.planner import Asked, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import DataGroups
from autopar.planning.price.predict import predict
from autopar.planning.price.step_time import step_time
from autopar.planning.space.candidates import Candidate, Model, Space

WIDE = named("h100-80g")
SMALL = replace(WIDE, ranks=2)  # of a node
MACHINES = {"nodes of 8": WIDE, "nodes of 2": SMALL}
KEYS, QUERIES, LENGTH = 4, 8, 4096
ORDER = ("pp", "dp", "fsdp", "cp", "ulysses", "tp")


def job(rows: int = 2, keys: int = KEYS, length: int = LENGTH, depth: int = 4) -> autopar.Job:
    with torch.device("meta"):
        model = Llama(depth, 1024, QUERIES, keys, 2816, 4096, length)
        ids = torch.empty(rows, length, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


@cache
def layers(name: str) -> Layers:
    first, machine = next(iter(MACHINES)), MACHINES[name]
    return layers_of(job(), machine) if name == first else on_same_captures(layers(first), machine)


@cache
def once(rows: int, keys: int, length: int, depth: int) -> Once:
    """A step of these sizes, captured for all meshes and machines."""
    return captured(job(rows, keys, length, depth))


def emitted(
    mesh: str, machine: Machine, rows: int, keys: int = KEYS, length: int = LENGTH, depth: int = 4, **options: object
) -> Compiled:  # fmt: skip
    return once(rows, keys, length, depth).compiled(mesh, Fixed(machine=machine), **options)  # type: ignore[arg-type]


# -- predictions ----------------------------------------------------------------------------------------------------

PLANS = [
    Candidate(1, 1, 1, 0, "none", 1, 2, cp=2, ulysses=2), Candidate(2, 1, 1, 1, "none", 1, 4, cp=2, ulysses=2),
    Candidate(1, 2, 1, 0, "none", 1, 2, cp=2, ulysses=2, sequence=True),
    Candidate(1, 1, 2, 0, "none", 1, 4, cp=2, ulysses=2, order=("cp", "ulysses", "pp", "dp", "fsdp", "tp")),
]  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("candidate", PLANS, ids=str)
def test_a_prediction_is_near_the_emitted_programs(candidate: Candidate, name: str) -> None:
    machine, rows = MACHINES[name], candidate.dp * candidate.fsdp * candidate.rows * candidate.microbatches
    compiled = emitted(candidate.mesh, machine, rows, **candidate.options())
    found = predict(candidate, layers(name), machine)
    assert found.total == pytest.approx(step_time(compiled, machine).total, rel=0.05)
    peak = max(peaks_of(compiled))
    assert found.memory == pytest.approx(peak, rel=0.04)


def test_data_axes_are_those_of_as_many_ranks_of_cp() -> None:
    plan = Candidate(2, 1, 1, 1, "none", 1, 2, cp=2, ulysses=2, order=ORDER)
    for each in (plan, plan._replace(zero=0), plan._replace(fsdp=2, zero=3)):
        twin = each._replace(cp=4, ulysses=1)
        assert (each.data, each.shards, DataGroups.of(each, 8)) == (twin.data, twin.shards, DataGroups.of(twin, 8))
    assert DataGroups.of(plan, 4) == DataGroups(RankGroup(8, 4), RankGroup(1))


# -- where it is drawn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_heads_are_split_as_the_compiler_splits_them(keys: int, tp: int) -> None:
    allowed = [n for n in (2, 4, 8) if n in head_splits(keys, QUERIES // keys, tp)]
    for size in (2, 4, 8):
        mesh = f"ulysses={size},tp={tp}" if tp > 1 else f"ulysses={size}"
        try:
            emitted(mesh, WIDE, 1, keys, length=64, depth=1)
        except LayoutError as error:
            assert size not in allowed, error
        else:
            assert size in allowed, mesh


def space(**fixed: object) -> Space:
    return Space(16, 4, 8, Model(4, heads=frozenset({(KEYS, QUERIES // KEYS)})), {"zero": 1, "pp": 1, **fixed})


def sizes(found: Space) -> set[tuple[int, int]]:
    return {(each.cp, each.ulysses) for each in found.candidates() if each.tp == 1}


def test_it_is_drawn_inside_of_cp_where_heads_allow_it() -> None:
    alone = {(4, 1), (8, 1), (16, 1)}  # four rows are for four ranks of dp at most
    beside = {(2, 2), (4, 2), (8, 2), (2, 4), (4, 4)}
    assert sizes(space()) == alone | beside, "2 and 4 divide the heads of keys"
    assert sizes(space(ulysses=4)) == {(1, 4), (2, 4), (4, 4)}
    assert sizes(space(cp=2)) == {(2, 2), (2, 4)}
    assert sizes(replace(space(), model=Model(4))) == alone, "no attention"
    assert (1, 4) in sizes(replace(space(), model=replace(space().model, alone=True))), "attention='ring'"
    for each in space().candidates():
        names = [axis for axis, _ in each.axes]
        assert each.ulysses == 1 or names.index("ulysses") == names.index("cp") + 1, each
    apart = space(order=("cp", "dp", "ulysses"), cp=2, dp=2, ulysses=4)
    assert {each.mesh for each in apart.candidates()} == {"cp=2,dp=2,ulysses=4"}


@pytest.mark.parametrize("mesh", [2, 4])
@pytest.mark.parametrize("keys", [1, 2, 8])
def test_alone_it_is_no_faster_than_cp(keys: int, mesh: int) -> None:
    """The reason why it is drawn beside cp alone: cp takes heads, or keys and values, whichever moves fewer bytes."""
    assert mesh in head_splits(keys, QUERIES // keys, 1)
    for machine in MACHINES.values():
        us = [
            step_time(emitted(f"{axis}={mesh}", machine, 1, keys, depth=2), machine).total for axis in ("cp", "ulysses")
        ]
        assert us[0] <= us[1] * 1.01, "the sum of one small gradient is hidden or not"


# -- the search -----------------------------------------------------------------------------------------------------


def test_the_search_finds_what_trying_everything_finds() -> None:
    fixed = {"recompute": "none", "zero": 1, "rows": 1, "tp": 1, "fsdp": 1, "schedule": "1f1b"}
    found = planned(layers("nodes of 2"), Asked(8, 2, SMALL, math.inf, fixed, 3))
    bounds, tried = Bounds(layers("nodes of 2"), found.work, SMALL, found.model.layers), {}
    for candidate in Space(8, 2, SMALL.ranks, found.model, fixed).candidates():
        tried[candidate] = made = predict(candidate, layers("nodes of 2"), SMALL)
        for bound in bounds.steps:
            assert bound(candidate) <= made.total * (1 + 1e-9), (candidate, bound)
        for memory in bounds.memories.values():
            assert memory(candidate) <= made.memory * (1 + 1e-9), candidate
    assert {each.ulysses for each in tried} == {1, 2, 4}
    best = sorted(tried.values(), key=lambda each: each.total)[:3]
    assert [each.total for each in found.found.best] == pytest.approx([each.total for each in best])
    assert sum(found.found.counts.values()) == len(tried)


ALONE = {"recompute": "none", "zero": 1, "rows": 1, "tp": 1, "pp": 1, "schedule": "1f1b"}


def test_what_heads_do_not_allow_is_refused() -> None:
    text = r"axis 'ulysses' \(size 8\) splits the heads of every attention, and cannot divide the 8 heads \(4 of keys\)"
    with pytest.raises(PlanError, match=text):
        planned(layers("nodes of 8"), Asked(8, 2, WIDE, math.inf, {**ALONE, "ulysses": 8}, 1))
