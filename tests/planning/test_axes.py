"""The axes of plans: which lie in a node, fsdp beside dp, and cp; what is predicted of them, and what is left out."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache
from itertools import permutations

import pytest
import torch
from models import Llama, token_loss

import autopar
from autopar.errors import PlanError
from autopar.ir.measure import group_of
from autopar.ir.mesh import Mesh
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.planning.candidates import Candidate, Model, Space
from autopar.planning.data_time import DataGroups
from autopar.planning.fixed import WAYS, fixed_text, read_fixed
from autopar.planning.jobs import layers_of
from autopar.planning.layers import Layers
from autopar.planning.orders import ORDER, orders
from autopar.planning.predict import Prediction, predict

FLAT = Machine.flat(1e6, 1e5, 1e4, 2.0, 1.0)
MACHINE = replace(FLAT, ranks=2, between=replace(FLAT.between, bandwidth=2e9, start_us=20.0))
ROWS = 8


def job() -> autopar.Job:
    with torch.device("meta"):
        model = Llama(6, 256, 8, 8, 512, 512, 64)
        ids = torch.empty(2, 64, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


@cache
def layers() -> Layers:
    return layers_of(job(), MACHINE)


def predicted(candidate: Candidate) -> Prediction:
    cost = layers().cost(candidate.split, candidate.rows, candidate.recompute)
    return predict(candidate, cost, layers().equal, MACHINE)


# -- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [2, 4, 6, 64])
@pytest.mark.parametrize("sizes", [(2, 4, 1, 1, 2), (1, 2, 3, 1, 2), (2, 2, 2, 2, 2), (1, 1, 1, 1, 4)], ids=str)
def test_every_order_has_the_groups_of_one_that_is_kept(sizes: tuple[int, ...], node: int) -> None:
    named = dict(zip(ORDER, sizes, strict=True))
    wide = [axis for axis in ORDER if named[axis] > 1]
    made = {groups(tuple(axis for axis in order if axis in wide), named, node) for order in orders(named, node)}
    every = {groups(o, named, node) for o in permutations(wide) if not {"cp", "tp"} <= {*o[o.index("tp") :]}}
    assert made == every and len(made) == len(orders(named, node))
    if math.prod(sizes) <= node:
        assert orders(named, node) == [(*(axis for axis in ORDER if axis not in wide), *wide)]


def groups(order: tuple[str, ...], sizes: dict[str, int], node: int) -> tuple[object, ...]:
    mesh = Mesh(tuple((axis, sizes[axis]) for axis in order))
    found = {axis: group_of(mesh, axis, node).inside for axis in order}
    return tuple(found[axis] if axis != "pp" else found[axis] == sizes[axis] for axis in sorted(order))


def test_an_order_that_is_asked_for() -> None:
    sizes = {"pp": 2, "dp": 2, "fsdp": 1, "cp": 1, "tp": 2}
    assert {order.index("dp") > order.index("tp") for order in orders(sizes, 2, ("tp", "dp"))} == {True}
    some = list(Space(8, 8, 2, Model(6), {"order": ("tp", "dp"), "pp": 2, "tp": 2}).candidates())
    assert {each.mesh for each in some if each.cp == 1 and each.fsdp == 1} == {"tp=2,dp=2,pp=2", "pp=2,tp=2,dp=2"}


def test_groups_of_the_data_axes() -> None:
    plan = Candidate(2, 2, 1, 3, "none", 1, 2, fsdp=4, cp=2)
    assert DataGroups.of(plan, 8) == DataGroups(Group(8, 4), Group(2, 1))
    assert DataGroups.of(replace(plan, order=("cp", "tp", "dp", "pp", "fsdp")), 8) == DataGroups(
        Group(8, 4), Group(2, 2)
    )
    assert DataGroups.of(replace(plan, fsdp=1, zero=0), 8) == DataGroups(Group(1), Group(4, 4))
    assert DataGroups.of(replace(plan, fsdp=1, zero=1), 4) == DataGroups(Group(4, 2), Group(1))


# -- what is decided ------------------------------------------------------------------------------------------------


def test_all_of_a_candidate_can_be_decided() -> None:
    assert WAYS.keys() == {field.name for field in fields(Candidate)}
    read = dict(map(read_fixed, ("tp=8", "sequence=false", "order=pp,dp,tp", "schedule=1f1b", "recompute=full")))
    assert fixed_text(read) == "tp=8, sequence=false, order=pp,dp,tp, schedule=1f1b, recompute=full"
    for each in Space(8, 8, 2, Model(6), read_all("sequence=false", "tp=2", "rows=2", "fsdp=2")).candidates():
        assert (each.sequence, each.tp, each.rows, each.fsdp) == (False, 2, 2, 2)


def read_all(*texts: str) -> dict[str, object]:
    return dict(map(read_fixed, texts))


@pytest.mark.parametrize("text", ["tp=x", "sequence=1", "order=tp,tp", "order=ep", "chunks", "recompute=half"])
def test_what_cannot_be_decided(text: str) -> None:
    with pytest.raises(PlanError) as raised:
        read_fixed(text)
    assert str(raised.value) == (
        f"--fix {text}: write dp=N, fsdp=N, cp=N, tp=N, pp=N, zero=N, rows=N, microbatches=N, "
        f"recompute=none|selective|full, schedule=1f1b|interleaved-1f1b, sequence=true|false or order=AXIS,AXIS,...; "
        f"axes are pp, dp, fsdp, cp, tp."
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
    given, rows = job(), candidate.dp * candidate.fsdp * candidate.rows * candidate.microbatches
    ids = torch.empty(rows, 64, dtype=torch.int64, device="meta")
    compiled = autopar.compile(
        given.model, candidate.mesh, loss_fn=token_loss, batch=(ids, ids), precision="bf16", **candidate.options()
    )
    assert predicted(candidate).total == pytest.approx(compiled.time(MACHINE).total, rel=0.15)
