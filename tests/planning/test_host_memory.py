"""Plans with states or parameters in the host's memory: there where nothing fits without, and never slower."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from models import Llama, token_loss
from plan_jobs import captured, compiled_for, llama_job, on_same_captures, reports_of, rows_of
from verified import Once

import autopar
from autopar.errors import PlanError
from autopar.ir.ops.measure import human
from autopar.machines import Machine, named
from autopar.planning.find_plan import search
from autopar.planning.jobs import layers_of
from autopar.planning.planner import Asked, planned, space_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import predict
from autopar.planning.space.candidates import Candidate
from autopar.report.emitted import checked
from autopar.report.plans import memory_text

H100 = named("h100-80g")
GIB = 2**30
# The device and the host of arXiv 2101.06840, with the products of an H100, which no memory hangs on.
SMALL = replace(
    H100, name="32g", device=replace(H100.device, memory=32 * GIB), ranks=1, host_memory=128 * GIB, to_host=12e9
)


def job(
    layers: int, width: int, hidden: int, rows: int, length: int, dtype: torch.dtype | None = None
) -> autopar.Job:  # fmt: skip
    with torch.device("meta"):
        model = Llama(layers, width, width // 128, width // 128, hidden, 32000, length)
        model = model if dtype is None else model.to(dtype)
        ids = torch.empty(rows, length, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16" if dtype is None else None)


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_13_billion_parameters_on_one_device():
    """In bfloat16, 8 bytes a parameter: 104 GB. With weights and states in fp32 it is 16, which this host lacks."""
    layers = layers_of(job(40, 5120, 13824, 1, 1024, torch.bfloat16), SMALL)
    asked = Asked(1, 1, SMALL, fixed={"recompute": "full"}, top=2)
    found = planned(layers, asked).found
    best = found.best[0]
    assert best.candidate.offload == "parameters" and best.memory < 4e9 and 100e9 < best.host < 0.9 * 128 * GIB
    assert "nothing fits without the host's memory" in found.certificate
    with pytest.raises(PlanError, match=r"^no plan fits in 31.6 GB a device .* least memory is 130 GB"):
        planned(layers, replace(asked, may_offload=False))


@pytest.mark.slow
def test_70_billion_parameters_on_eight_devices():
    """With states in fp32 in the host's memory, the rest split over the devices."""
    machine = replace(H100, host_memory=2048 * GIB)
    with torch.device("meta"):
        model = Llama(80, 8192, 64, 8, 28672, 32000, 4096)
        ids = torch.empty(8, 4096, dtype=torch.int64)
    layers = layers_of(autopar.Job(model, token_loss, (ids, ids), precision="bf16"), machine)
    asked = Asked(8, 8, machine, fixed={"tp": 1, "pp": 1, "cp": 1, "zero": 3, "recompute": "full"}, top=1)
    (best,) = planned(layers, asked).found.best
    assert best.candidate.offload == "optimizer" and best.memory < 0.92 * 85.9e9 and best.host * 8 < 0.9 * 2048 * GIB


# -- what fits without it ---------------------------------------------------------------------------------------------

LINK = replace(Machine.flat(1e6, 1e5, 1e3, 2.0, 1.0), host_memory=1e12)
FIXED = {"recompute": "none", "pp": 1, "tp": 1, "cp": 1}


@cache
def small() -> Layers:
    return layers_of(llama_job(), LINK)


@pytest.mark.parametrize("link", [1e5, 1e9, 1e13], ids=["slow", "as fast", "fast"])
def test_no_plan_is_slower_than_one_that_fits_without(link: float):
    machine = replace(LINK, to_host=link)
    asked = Asked(4, 4, machine, math.inf, FIXED, 3)
    every = planned(small(), replace(asked, top=100, may_offload=False)).found.best
    bytes_ = sorted(each.memory for each in every)
    for limit in (bytes_[0] * 1.01, bytes_[len(bytes_) // 2], bytes_[-1]):
        plain = planned(small(), replace(asked, memory=limit, may_offload=False)).found.best
        best = planned(small(), replace(asked, memory=limit)).found.best
        assert best[0].total <= plain[0].total and all(each.memory <= limit for each in best)
        there = [each for each in best if each.candidate.offload != "none"]
        assert all(each.total < plain[0].total for each in there) and len(there) < 2
        assert link > 1e5 or not there


@pytest.mark.parametrize("part", [0.3, 0.6])
def test_what_was_slower_without_is_not_looked_at_again(part: float):
    """The search of plans with states, or activations, in the host's memory finds the same among fewer."""
    machine = replace(LINK, ranks=2, to_host=1e9)
    asked = Asked(4, 8, machine, math.inf, {"pp": 1, "tp": 1}, 2, may_offload=False)
    made = planned(small(), asked)
    most, least = (of(each.memory for each in made.found.tried) for of in (max, min))
    limit = least + part * (most - least)
    space = space_of(replace(asked, memory=limit), made.model)
    found = search(space, small(), made.work, machine, limit, 2)
    for waits in ("optimizer", "activations"):
        every = replace(space, fixed={**asked.fixed, "offload": waits})
        there = replace(every, among=found.near)
        kept, drawn = set(there.drawn()), list(every.drawn())
        assert [one for one in drawn if one in kept] == [*there.drawn()] and len(kept) < len(drawn)
        few, all_ = (
            search(each, small(), made.work, machine, limit, 1, known=found.best[:1]) for each in (there, every)
        )
        assert few.best == all_.best


def test_a_pipeline_of_parameters_that_wait():
    """Two nodes, none of which has the host's memory for all of it, and rows that two ranks of data do not divide."""
    machine = replace(H100, ranks=1, host_memory=2e9)
    asked = Asked(2, 3, machine, 0.5e9, {"tp": 1, "cp": 1, "recompute": "full"}, 1)
    best = checked(planned(layers(), asked)).found.best[0]
    assert best.candidate.pp == 2 and best.candidate.offload == "parameters" and best.is_emitted
    assert best.memory <= 0.5e9 and best.host <= 0.9 * 2e9
    with pytest.raises(PlanError):  # before, parameters waited on one stage alone
        planned(layers(), replace(asked, fixed={**asked.fixed, "pp": 1}))


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(1, 1, 2, 0, "full", 1, 4, offload="parameters"),
        Candidate(1, 1, 2, 0, "none", 1, 4, "zb-h1", offload="parameters"),
        Candidate(1, 1, 2, 0, "full", 1, 4, "interleaved-1f1b", chunks=2, offload="parameters"),
        Candidate(2, 1, 2, 3, "full", 1, 4, offload="parameters"),
    ],
    ids=str,
)
def test_pipelines_of_parameters_that_wait_are_near_the_emitted_ones(candidate: Candidate):
    """Of the host within 2 %; times within 12 %, and of the device -5 to +20 %: what no formula has is emitted."""
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    reports = reports_of(compiled)
    found = predict(candidate, layers(), H100)
    assert found.host == pytest.approx(max(report.host for report in reports), rel=0.02)
    assert 0.95 < found.memory / max(report.peak for report in reports) < 1.2
    assert found.total == pytest.approx(compiled.time(H100).total, rel=0.12)


def test_a_disk_where_the_host_has_too_little_memory(tmp_path: Path):
    """The same plan on a disk, where nothing fits else: slower by its speed, and refused where that is full too. What
    is emitted says the same bytes of device and disk, and the same time within 5 %."""
    host = replace(H100, host_memory=16e9, disk=2e9)
    disk = replace(host, host_memory=1e9, disk_folder=str(tmp_path), disk_memory=16e9)
    of_disk = on_same_captures(layers(), disk)
    asked = Asked(1, 2, host, 0.65e9, {"recompute": "full"}, 1)
    (there,), (below,) = (planned(layers(), replace(asked, machine=machine)).found.best for machine in (host, disk))
    assert there.candidate.offload == below.candidate.offload == "parameters" and below.candidate.folder
    assert below.candidate.options()["offload"] == {"parameters": "disk"} and "parameters on disk" in str(
        below.candidate
    )
    assert below.host == there.host and below.total > 1.2 * there.total
    assert "2.69 GB on disk" in memory_text(below)
    both = planned(layers(), replace(asked, machine=replace(disk, host_memory=16e9))).found.best
    assert not both[0].candidate.folder  # the host has room
    with pytest.raises(PlanError, match=r"takes 2.69 GB of the disk, of which a rank may take 2 GB. More room there"):
        planned(layers(), replace(asked, machine=replace(disk, disk_memory=2e9)))
    below = planned(of_disk, replace(asked, machine=disk)).found.best[0]
    found = checked(planned(of_disk, replace(asked, machine=disk))).found.best[0]
    assert found.is_emitted and found.host == below.host
    assert found.total == pytest.approx(below.total, rel=0.05) and found.memory == pytest.approx(below.memory, rel=0.01)


def test_states_on_a_disk_where_parameters_fit():
    """Optimizer states alone lie there, where that is enough."""
    disk = replace(LINK, host_memory=1.0, disk=1e6, disk_folder="/nvme", disk_memory=1e12)
    plain = planned(small(), Asked(4, 4, LINK, math.inf, FIXED, 100, may_offload=False)).found.best
    limit = min(each.memory for each in plain) * 0.9
    with pytest.raises(PlanError):
        planned(small(), Asked(4, 4, replace(disk, disk_folder=""), limit, FIXED, 1))
    (best,) = planned(small(), Asked(4, 4, disk, limit, FIXED, 1)).found.best
    assert best.candidate.options() | {"offload": "optimizer", "offload_dir": "/nvme"} == best.candidate.options()


def test_it_may_be_decided_and_is_told():
    found = planned(small(), Asked(4, 4, LINK, math.inf, {**FIXED, "offload": "optimizer"}, 3)).found
    assert {each.candidate.offload for each in found.best} == {"optimizer"}
    assert found.best[0].candidate.options()["offload"] == "optimizer" and "optimizer in host" in str(
        found.best[0].candidate
    )
    hosted = planned(small(), Asked(4, 4, LINK, math.inf, {**FIXED, "offload": "parameters"}, 3)).found
    assert all(each.candidate.microbatches == each.candidate.pp == 1 for each in hosted.best)
    nothing = replace(LINK, host_memory=0.0)
    with pytest.raises(PlanError, match=r"Of the host's memory machine flat says nothing \(host_memory\)"):
        planned(small(), Asked(4, 4, nothing, 1e4, FIXED))


# -- beside the emitted programs --------------------------------------------------------------------------------------


@cache
def once(rows: int) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(8, 1024, 2816, rows, 512))


@cache
def layers() -> Layers:
    return layers_of(job(8, 1024, 2816, 2, 512), H100)


@pytest.mark.parametrize(
    ("candidate", "memory"),
    [
        (Candidate(1, 1, 1, 0, "none", 2, 1, offload="optimizer"), 0.01),
        (Candidate(1, 1, 2, 0, "none", 1, 4, offload="optimizer"), 0.02),
        (Candidate(1, 1, 1, 0, "full", 1, 1, offload="parameters"), 0.005),
        (Candidate(1, 1, 1, 0, "none", 2, 1, offload="parameters"), 0.005),
        (Candidate(1, 2, 1, 0, "full", 2, 1, offload="parameters", sequence=True), 0.005),
        (Candidate(1, 1, 1, 0, "selective", 1, 1, offload="parameters"), 0.01),
        (Candidate(2, 1, 1, 3, "full", 2, 1, offload="parameters"), 0.005),
        (Candidate(2, 2, 1, 3, "none", 1, 1, offload="parameters"), 0.005),
    ],
    ids=str,
)  # fmt: skip
def test_figures_are_those_of_the_emitted_programs(candidate: Candidate, memory: float):
    """Of the host to the byte; of parameters that come layer by layer times within 5 %. Red before: up to 14 % too
    little of the device, where what comes is gathered a layer later, where a gather reads what is copied for it, and
    where the last layer's weights were cast again from what had come."""
    compiled = compiled_for(once(rows_of(candidate)), candidate)
    reports = reports_of(compiled)
    found = predict(candidate, layers(), H100)
    assert found.host == max(report.host for report in reports)
    assert found.memory == pytest.approx(max(report.peak for report in reports), rel=memory)
    assert found.total == pytest.approx(compiled.time(H100).total, rel=0.05)


def test_a_host_that_is_too_small_is_told():
    machine = replace(H100, host_memory=2e9)
    with pytest.raises(PlanError) as caught:
        planned(layers(), Asked(1, 2, machine, 0.65e9, {"recompute": "full"}))
    assert str(caught.value) == (
        "no plan for 1 devices: dp=1 recompute 1 x 2 rows parameters in host fits in 650 MB a device, and takes 2.69 "
        "GB of the host's memory, of which a rank may take 1.8 GB. More host memory, more nodes, or a model in "
        "bfloat16, whose gradients and states are half as large, would do."
    )


def test_a_plan_with_parameters_there_is_compiled_as_it_says():
    asked = Asked(2, 4, replace(H100, host_memory=1e12), 0.65e9, {"tp": 1, "recompute": "full"}, 1)
    best = checked(planned(layers(), asked)).found.best[0]
    assert best.is_emitted and best.candidate.offload == "parameters" and best.memory <= 0.65e9 and best.host > 0
    assert memory_text(best) == f"{human(best.memory)} + {human(best.host)} of the host"
