"""The axes of plans: which lie in a node, fsdp beside dp, and cp; what is predicted of them, and what is left out."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest
import torch
from models import Llama, token_loss
from plan_jobs import captured, compiled_for, llama_job, on_same_captures, rows_of
from torch import nn
from verified import Once

import autopar
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import group_of
from autopar.machines import Machine, named
from autopar.machines.model import RankGroup
from autopar.planning.bounds import Bounds
from autopar.planning.jobs import layers_of
from autopar.planning.others import reasons
from autopar.planning.planner import Asked, Planned, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import DataGroups
from autopar.planning.price.predict import Prediction, predict
from autopar.planning.space.axis_orders import ORDER, orders
from autopar.planning.space.candidates import Candidate, Model, Space
from autopar.planning.space.fixed import WAYS, fixed_text, read_fixed

FLAT = Machine.flat(1e6, 1e5, 1e4, 2.0, 1.0)
MACHINE = replace(FLAT, ranks=2, between=replace(FLAT.between, bandwidth=2e9, start_us=20.0))
# So that there are few programs to make.
PLAIN = {"recompute": "none", "schedule": "1f1b", "sequence": False}


@cache
def layers() -> Layers:
    return layers_of(llama_job(), MACHINE)


@cache
def once(rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(llama_job(rows=rows))


def predicted(candidate: Candidate) -> Prediction:
    return predict(candidate, layers(), MACHINE)


# -- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [2, 4, 6, 64])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 4, 1, 1, 1, 2),
        (1, 2, 3, 1, 1, 2),
        (2, 2, 2, 2, 1, 2),
        (1, 4, 1, 4, 2, 1),
        (1, 2, 1, 2, 2, 2),
        (1, 1, 1, 1, 1, 4),
    ],
    ids=str,
)
def test_every_order_has_the_groups_of_one_that_is_kept(sizes: tuple[int, ...], node: int) -> None:
    named = dict(zip(ORDER, sizes, strict=True))
    wide = [axis for axis in ORDER if named[axis] > 1]
    made = {groups(tuple(axis for axis in order if axis in wide), named, node) for order in orders(named, node)}
    every = {groups(o, named, node) for o in permutations(wide) if is_allowed("".join(o))}
    assert made == every and len(made) == len(orders(named, node))
    if math.prod(sizes) <= node:
        assert orders(named, node) == [(*(axis for axis in ORDER if axis not in wide), *wide)]


def is_allowed(order: str) -> bool:
    """ulysses directly inside of cp, and both outside of tp."""
    together = order.replace("cpulysses", "cp")
    return "ulysses" not in together and ("cp" not in order or "cp" not in together.partition("tp")[2])


def groups(order: tuple[str, ...], sizes: dict[str, int], node: int) -> tuple[object, ...]:
    mesh = Mesh(tuple((axis, sizes[axis]) for axis in order))
    found = {axis: group_of(mesh, axis, node).inside for axis in order}
    return tuple(found[axis] if axis != "pp" else found[axis] == sizes[axis] for axis in sorted(order))


def test_an_order_that_is_asked_for() -> None:
    sizes = {**dict.fromkeys(ORDER, 1), "pp": 2, "dp": 2, "tp": 2}
    assert {order.index("dp") > order.index("tp") for order in orders(sizes, 2, ("tp", "dp"))} == {True}
    some = list(Space(8, 8, 2, Model(6), {"order": ("tp", "dp"), "pp": 2, "tp": 2}).candidates())
    assert {each.mesh for each in some if each.cp == 1 and each.fsdp == 1} == {"tp=2,dp=2,pp=2", "pp=2,tp=2,dp=2"}


def test_groups_of_the_data_axes() -> None:
    plan = Candidate(2, 2, 1, 3, "none", 1, 2, fsdp=4, cp=2)
    assert DataGroups.of(plan, 8) == DataGroups(RankGroup(8, 4), RankGroup(2, 1))
    assert DataGroups.of(plan._replace(order=("cp", "tp", "dp", "pp", "fsdp")), 8) == DataGroups(
        RankGroup(8, 4), RankGroup(2, 2)
    )
    assert DataGroups.of(plan._replace(fsdp=1, zero=0), 8) == DataGroups(RankGroup(1), RankGroup(4, 4))
    assert DataGroups.of(plan._replace(fsdp=1, zero=1), 4) == DataGroups(RankGroup(4, 2), RankGroup(1))


# -- what is decided ------------------------------------------------------------------------------------------------


def test_all_of_a_candidate_can_be_decided() -> None:
    assert WAYS.keys() == set(Candidate._fields) - {"again", "ep", "experts", "folder", "memory", "moved"}, (
        "they follow from the memory, and from the best plan"
    )
    read = dict(map(read_fixed, ("tp=8", "sequence=false", "order=pp,dp,tp", "schedule=1f1b", "recompute=full")))
    assert fixed_text(read) == "tp=8, sequence=false, order=pp,dp,tp, schedule=1f1b, recompute=full"
    for each in Space(8, 8, 2, Model(6), read_all("sequence=false", "tp=2", "rows=2", "fsdp=2")).candidates():
        assert (each.sequence, each.tp, each.rows, each.fsdp) == (False, 2, 2, 2)


def read_all(*texts: str) -> dict[str, object]:
    return dict(map(read_fixed, texts))


@pytest.mark.parametrize(
    "text", ["tp=x", "rows=0", "sequence=1", "order=tp,tp", "order=ep", "chunks", "recompute=half"]
)
def test_what_cannot_be_decided(text: str) -> None:
    with pytest.raises(PlanError) as raised:
        read_fixed(text)
    assert str(raised.value) == (
        f"--fix {text}: write dp=N, fsdp=N, cp=N, ulysses=N, tp=N, pp=N, zero=N, rows=N, microbatches=N, "
        f"chunks=N, recompute=none|selective|full|layers|stage|stage+full, "
        f"schedule=1f1b|interleaved-1f1b|zb-h1|zb-h2|zb-v|gpipe, "
        f"sequence=true|false, reshard_after_forward=true|false, offload=none|optimizer|activations|"
        f"parameters|activations,optimizer|activations,parameters|optimizer=disk|parameters=disk or "
        f"order=AXIS,AXIS,...; axes are pp, dp, fsdp, cp, ulysses, tp."
    )


# -- predictions ----------------------------------------------------------------------------------------------------

TP_OUTSIDE = ("tp", "pp", "dp", "fsdp", "cp")
PLANS = [
    Candidate(2, 2, 1, 0, "none", 1, 4, order=TP_OUTSIDE), Candidate(2, 1, 1, 2, "none", 1, 2, fsdp=2),
    Candidate(2, 1, 2, 1, "none", 1, 4, order=("dp", "fsdp", "cp", "tp", "pp")),
    Candidate(1, 2, 1, 0, "none", 1, 4, cp=2, sequence=True), Candidate(2, 1, 1, 3, "none", 1, 2, fsdp=2, cp=2),
]  # fmt: skip


@pytest.mark.parametrize("candidate", PLANS, ids=str)
def test_a_prediction_is_near_the_simulation_of_the_emitted_programs(candidate: Candidate) -> None:
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    assert predicted(candidate).total == pytest.approx(compiled.time(MACHINE).total, rel=0.15)


# -- the search -----------------------------------------------------------------------------------------------------


ONE_ROW = {**PLAIN, "rows": 1}


@cache
def found() -> Planned:
    return planned(layers(), Asked(4, 4, MACHINE, math.inf, ONE_ROW, 3))


def test_the_search_finds_what_trying_everything_finds() -> None:
    bounds = Bounds(layers(), found().work, MACHINE, layers().equal)
    tried = {}
    for candidate in Space(4, 4, MACHINE.ranks, found().model, ONE_ROW).candidates():
        tried[candidate] = made = predicted(candidate)
        for bound in bounds.steps:
            assert bound(candidate) <= made.total * (1 + 1e-9), (candidate, bound)
        assert bounds.memory(candidate) <= made.memory * (1 + 1e-9), candidate
        assert not bounds.is_larger(candidate, made.memory * (1 + 1e-9)), candidate
    for axis in ("fsdp", "cp", "tp", "pp"):
        assert {getattr(each, axis) for each in tried} > {1}, axis
    assert len({each.axes for each in tried}) > len({frozenset(each.axes) for each in tried}), "orders"
    best = sorted(tried.values(), key=lambda each: each.total)[:3]
    assert [each.total for each in found().found.best] == pytest.approx([each.total for each in best])
    assert sum(found().found.counts.values()) == len(tried)


def test_plans_that_only_lie_elsewhere_are_one() -> None:
    """Messages of cp that products hide take no time, inside a node or between nodes."""
    fast = replace(FLAT, ranks=2, between=replace(FLAT.between, start_us=FLAT.inside.start_us))
    fixed = {**ONE_ROW, "pp": 1, "tp": 1}
    made = planned(on_same_captures(layers(), fast), Asked(4, 4, fast, math.inf, fixed, 100)).found
    # with one micro-batch ZeRO-2 is ZeRO-1
    apart = [each for each in made.tried if (each.candidate.zero, each.candidate.microbatches) != (2, 1)]
    tried, best = (Counter(unordered(each) for each in some) for some in (apart, made.best))
    assert set(tried.values()) == {1, 2}, "both orders are looked at"
    assert tried.keys() == best.keys() and set(best.values()) == {1}
    for each in made.best:
        places = [ORDER.index(axis) for axis, _ in each.candidate.axes]
        assert places == sorted(places), each


def unordered(made: Prediction) -> Candidate:
    return made.candidate._replace(order=ORDER)


def test_why_other_places_lost() -> None:
    best = found().found.best[0].candidate
    assert len(best.axes) == 2, "what follows is of this one"
    lines = [line for line in reasons(found()) if " inside the node: " in line]
    assert [line.partition(" inside")[0] for line in lines] == [best.axes[0][0]]
    assert f"({best.axes[1][0]}={best.axes[1][1]},{best.axes[0][0]}={best.axes[0][1]} " in lines[0], lines


def test_rows_that_a_rank_of_dp_could_take_whole_are_no_faster_over_cp() -> None:
    space, left_out = Space(4, 8, MACHINE.ranks, found().model, {**PLAIN, "zero": 1, "microbatches": 2}), 0
    kept = set(space.candidates())
    known = {str(each) for each in kept}
    for each in replace(space, fixed={**space.fixed, "cp": 2}).candidates():
        if each not in kept and each.dp * each.fsdp == 2:
            left_out += 1
            whole = each._replace(dp=4, fsdp=1, cp=1, rows=each.rows // 2, order=ORDER)
            assert str(whole) in known and predicted(whole).total <= predicted(each).total * (1 + 1e-9), each
    assert left_out


def test_long_sequences_are_split() -> None:
    """131,072 positions a row, four rows on 64 devices: without cp nothing fits, or it is slower."""
    machine, length = named("h100-80g"), 131072
    with torch.device("meta"):
        model = Llama(4, 4096, 32, 8, 14336, 32000, length)
        ids = torch.empty(1, length, dtype=torch.int64)
    made = layers_of(autopar.Job(model, token_loss, (ids, ids), precision="bf16"), machine)
    fixed = {"zero": 3, "tp": 1, "pp": 1, "recompute": "none"}
    best = planned(made, Asked(64, 4, machine, None, fixed, 1)).found.best[0]
    assert best.candidate.cp >= 16
    with pytest.raises(PlanError, match=r"no plan for 64 devices and 4 rows a step with .*cp=1"):
        planned(made, Asked(64, 4, machine, None, {**fixed, "cp": 1}, 1))


def test_a_model_without_sequences_gets_no_cp() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    given = autopar.Job(blocks, lambda model, x: model(x).square().mean(), torch.randn(4, 64))
    made = planned(layers_of(given, MACHINE), Asked(4, 8, MACHINE, math.inf, PLAIN, 1))
    assert {each.candidate.cp for each in made.found.tried} == {1}
    assert re.search(r"; none with cp: of 2 ranks each would compute \d+% of the products$", made.certificate)
