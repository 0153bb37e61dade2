"""`memory=`: one option for recomputation, offload and gathered layers, no worse than the best of each alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import offload_case as case
import pytest
import torch

import autopar
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import MeshError, PlanError
from autopar.ir.ops.measure import human
from autopar.ir.ops.ops import TO_HOST
from autopar.ir.options import read_bytes
from autopar.ir.plan import Fixed
from autopar.machines import Machine
from autopar.parallel.session.auto_options import check_open
from autopar.report.memory.within_memory import lower_within

F64 = torch.float64
FLAT = replace(Machine.flat(1e6, 1e5, 1e3, 2.0, 1.0), to_host=2e9)  # computes fast, and launches for nothing
LINKED = replace(FLAT, to_host=1e12)  # copies cost nothing


def within(
    mesh: str, memory: Any, lift: torch.dtype | None = None, machine: Machine = FLAT, **options: Any
) -> Compiled:
    captured = case.captured("shallow", lift)[1]
    fixed = Fixed(machine=machine)
    return Compiled.of(lower_within(captured, mesh_of(mesh), options_of(memory=memory, **options), fixed))


def held(found: Compiled) -> int:
    return max(found.memory(ranks[0]).peak for ranks in found.alike)


ALONE: tuple[dict[str, Any], ...] = (
    *({"recompute": part} for part in (0.4, 0.6, 0.75, 0.9)),
    *({"offload": {"activations": part}} for part in (0.25, 0.5, 0.75, 1.0)),
    {"recompute": "full"},
    {"recompute": {"blocks.0-1": "full"}},
    {"reshard_after_forward": False},
    {},
)


def alone(mesh: str, machine: Machine) -> list[tuple[int, float, str]]:
    """What one of the three does alone, as it is emitted: (bytes at the peak, us, options)."""
    found = []
    for options in ALONE:
        try:
            made = case.compiled("shallow", mesh, machine=machine, **options)
        except PlanError:  # a budget that is too small
            continue
        found.append((held(made), made.time(machine).total, str(options)))
    return found


@pytest.mark.parametrize(
    ("mesh", "machine", "part"),
    [("dp=1", LINKED, 0.8), ("dp=1", FLAT, 0.85), ("fsdp=2", FLAT, 0.95)],
    ids=["fast link", "slow link", "gathered"],
)
def test_no_step_is_worse_than_the_best_of_each_alone(mesh: str, machine: Machine, part: float):
    """By the peak and the time of what is emitted, which are what was predicted: the search has no other figures."""
    single = alone(mesh, machine)
    plain = next(peak for peak, _, options in single if options == "{}")
    found = within(mesh, part, machine=machine)
    peak, took = held(found), found.time(machine).total
    assert peak <= part * plain
    fitting = [(us, options) for held, us, options in single if held <= part * plain]
    assert not [one for one in fitting if one[0] < took], (took, found.notes[-1])
    assert human(peak) in found.notes[-1] and f"{took / 1e3:.4g} ms" in found.notes[-1]


def test_all_three_are_taken_where_they_are_worth_it():
    link = within("fsdp=2", 0.9, machine=LINKED)
    assert any(node.target is TO_HOST for node in link.program.calls())
    flat = within("fsdp=2", 0.9)
    stay = flat.plan.options.reshard_after_forward
    assert stay is not True and flat.plan.options.recompute != "none" and flat.plan.options.memory is None
    plain = case.compiled("shallow", "fsdp=2", machine=FLAT)
    assert flat.time(FLAT).total < plain.time(FLAT).total  # layers that stay gathered pay for what is computed again


@pytest.mark.parametrize("mesh", ["fsdp=3"])
def test_it_is_the_same_step_to_the_bit(mesh: str):
    want = case.step("shallow", case.compiled("shallow", mesh, F64), F64)
    got = case.step("shallow", within(mesh, 0.8, F64), F64)
    assert got.keys() == want.keys() and not [key for key in want if not torch.equal(got[key], want[key])]


def test_a_pipeline_keeps_to_it_on_each_rank():
    options = {"microbatches": 2}
    found = within("pp=2", 0.9, F64, **options)
    assert held(found) <= 0.9 * held(case.compiled("shallow", "pp=2", F64, machine=FLAT, **options))
    want = case.step("shallow", case.compiled("shallow", "pp=2", F64, **options), F64)
    got = case.step("shallow", found, F64)
    assert not [key for key in want if not torch.equal(got[key], want[key])]


def test_a_limit_that_nothing_keeps_to_says_what_is_least():
    plain = case.compiled("shallow", "dp=1", machine=FLAT)
    states = sum(plain.memory().states.values())
    with pytest.raises(PlanError) as caught:
        within("dp=1", 1000)
    text = str(caught.value)
    assert text.startswith("memory=1000: a rank's device may hold 1000 bytes at its peak, and holds ")
    assert f"{states} of them parameters, gradients, states and inputs. Write " in text and "offload=" in text
    least = int(text.split("and holds ")[1].split()[0])
    assert held(within("dp=1", least)) == least


def test_what_fits_is_left_as_it_is_and_so_is_what_does_not_train():
    plain = case.compiled("shallow", "dp=1", machine=FLAT)
    found = within("dp=1", "1GiB")
    assert found.program.graph.nodes.__len__() == plain.program.graph.nodes.__len__()
    assert "by nothing" in found.notes[-1]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"recompute": 0.5}, "recompute"), ({"offload": "activations"}, "offload"),
     ({"reshard_after_forward": False}, "reshard_after_forward")],
)  # fmt: skip
def test_what_it_decides_is_not_said_beside_it(options: dict[str, Any], name: str):
    with pytest.raises(PlanError, match=f"decides recompute, .*Leave {name} or memory out"):
        within("fsdp=2", 0.5, **options)


def test_how_it_is_written():
    assert [read_bytes(text) for text in ("60GiB", "1.5 GB", "7", "60 gib", "x")] == [
        60 << 30,
        15 * 10**8,
        7,
        None,
        None,
    ]
    assert options_of(memory="1MiB").memory == 1 << 20
    for wrong in (0, -1, 0.0, 1.5, "60 gib", "", True):
        with pytest.raises(PlanError, match="memory="):
            options_of(memory=wrong)
    with pytest.raises(PlanError, match=r"memory=10 with cuda_graphs=True"):
        autopar.compiler.check_options.check_offload(options_of(memory=10), True)
    with pytest.raises(MeshError, match="a part is of what the step holds on one mesh"):
        check_open(True, {"memory": 0.5}, "global")


# -- layers that stay gathered ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("fsdp=3", {}), ("dp=2,fsdp=2", {"recompute": "full"}), ("pp=2,fsdp=2", {"microbatches": 2, "recompute": "full"})],
    ids=str,
)
def test_layers_that_stay_gathered_are_gathered_once(mesh: str, options: dict[str, Any]):
    """Between those of True and of False, with the same bits; of a pipeline once for all micro-batches."""
    some = {"blocks.2-3": False}
    found = {again: case.compiled("shallow", mesh, F64, **options, reshard_after_forward=again)  # type: ignore[misc]
             for again in (True, False)}  # fmt: skip
    made = case.compiled("shallow", mesh, F64, **options, reshard_after_forward=some)
    moved = [sum(row.times for row in one.collectives) for one in (found[False], made, found[True])]
    assert moved[0] < moved[1] < moved[2]
    want, got = case.step("shallow", found[True], F64), case.step("shallow", made, F64)
    assert not [key for key in want if not torch.equal(got[key], want[key])]


def test_patterns_of_layers_that_stay_gathered_name_some():
    with pytest.raises(PlanError) as caught:
        case.compiled("shallow", "fsdp=2", reshard_after_forward={"block.3": False})
    assert str(caught.value).startswith(
        "reshard_after_forward={'block.3': False}: the pattern 'block.3' names no module. Nearest names: 'blocks.3'"
    )
    with pytest.raises(PlanError, match=r"reshard_after_forward='no': write True or False, or those by pattern"):
        options_of(reshard_after_forward={"*": "no"})


def test_copies_stay_in_their_graphs_where_the_limit_is_below_all_else():
    """What goes beside the turns of others is on the device for a turn more on each side."""
    options = {"schedule": "gpipe", "microbatches": 4}
    captured, mesh, fixed = case.captured("deep")[1], mesh_of("pp=2"), Fixed(machine=case.SLOW)
    found = Compiled.of(lower_within(captured, mesh, options_of(memory=250_000, **options), fixed))
    assert found.plan.options.horizon == 1 and "horizon=1" in found.notes[-1] and held(found) <= 250_000
