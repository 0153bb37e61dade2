"""What no layer of a stage hides goes and comes by instructions: the same numbers, and less waiting than in graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import offload_case as case
import pytest
import torch
from pipelines import flow_of, with_host

from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.plan import Fixed
from autopar.ir.schedule import Action, Costs, Instruction, Timeline
from autopar.machines import DEVICES, named
from autopar.passes.costs.streams import run
from autopar.passes.offload.choose_moves import kept_of
from autopar.passes.offload.place_copies import CallLine, Ways, first_uses
from autopar.passes.schedules import parse_schedule, simulate, with_transfers
from autopar.passes.schedules.with_copies import _begins
from autopar.report.artifact.pipeline_json import parse_instruction, print_instruction
from autopar.report.host_copies import host_copies
from autopar.report.inspection_pipeline import memory_of_rank, transfers_text
from autopar.report.memory.estimate import memory_report
from autopar.report.timeline import picture

ON = {"offload": "activations"}
CASES = [
    ("shallow", "pp=4", {"schedule": "1f1b", "microbatches": 4}),
    ("shallow", "pp=2", {"schedule": "interleaved-1f1b", "microbatches": 4}),
    ("shallow", "pp=2", {"schedule": "zb-v", "microbatches": 4}),
    ("shallow", "pp=3", {"schedule": "zb-h1", "microbatches": 4, "recompute": {"blocks.0": "full"}}),
    ("shallow", "pp=2", {"schedule": "gpipe", "microbatches": 4}),
    ("gated", "pp=2,tp=2", {"schedule": "dualpipev", "microbatches": 4}),
    ("shallow", "pp=3,dp=2", {"schedule": "1f1b", "microbatches": 4, "zero": 2}),
    ("gpt", "pp=3", {"schedule": "seq1f1b", "microbatches": 2, "slices": 2}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES, ids=str)
def test_copies_beside_others_are_the_same_step_to_the_bit_and_hold_no_more(
    name: str, mesh: str, options: dict[str, Any]
):
    plain = case.compiled(name, mesh, torch.float64, **options)
    found = case.compiled(name, mesh, torch.float64, machine=case.SLOW, **options, **ON)  # no layer hides a copy
    assert found.pipeline is not None and plain.pipeline is not None
    lines = [line for lists in found.pipeline.lists for line in lists]
    assert {"OUT", "IN"} <= {line.op for line in lines}
    wanted, values = case.step(name, plain, torch.float64), case.step(name, found, torch.float64)
    assert all(torch.equal(values[key], wanted[key]) for key in wanted)
    for rank in range(0, found.mesh.size, found.mesh.size // found.pipeline.flow.size):
        sent = [line for line in found.pipeline.lists[found.mesh.coord(rank)["pp"]] if line.op == "SEND"]
        message = max(sum(type_.bytes_ for type_ in line.types) for line in sent)
        beside = message if "slices" in options else 0  # it has not arrived when its value is back already
        assert memory_report(found, rank).peak <= memory_report(plain, rank).peak + beside
    assert all(print_instruction(parse_instruction(print_instruction(line), found.pipeline.flow)) for line in lines)


def test_few_layers_a_stage_wait_for_less_than_in_graphs():
    """8 layers on 4 stages, whose copies a turn hides, and not what is left of a graph."""
    machine = named(DEVICES)
    with torch.device("meta"):
        model = case.Deep(8, 2048)
        found = capture(model, case.squares, (torch.zeros(16384, 2048),), {})

    def made(**more: Any) -> Compiled:
        options = options_of(schedule="1f1b", microbatches=8, recompute="full", **more)
        return Compiled.of(lower(found, mesh_of("pp=4"), options, Fixed(machine=machine)))

    plain, inside, beside = (made(**more) for more in ({}, {**ON, "horizon": 1}, ON))
    took = [one.time(machine).total for one in (plain, inside, beside)]
    assert took[0] <= took[2] < took[1], took
    assert (took[2] - took[0]) < 0.5 * (took[1] - took[0]), took
    assert "beside the turns of others (OUT and IN)" in beside.notes[-1] and len(beside.notes) == len(inside.notes) + 1
    assert "instructions" not in inside.notes[-1] and inside.pipeline is not None and beside.pipeline is not None
    assert {line.op for lines in inside.pipeline.lists for line in lines} == {"RUN", "SEND", "RECV"}
    moved = sum(one.bytes_ * one.times for one in host_copies(beside) if one.is_out)
    assert moved == sum(one.bytes_ * one.times for one in host_copies(beside) if not one.is_out) > 0


def test_the_simulator_waits_for_copies_by_hand():
    """One rank, three micro-batches that all come forward first; a turn of a forward takes 1 us, of a backward 2, and a
    copy 3: the link is what it waits for."""
    schedule = parse_schedule("gpipe", 1, 3)
    flow = with_host(flow_of(schedule.ranks, 3))
    size = flow.types["saved0"].bytes_
    costs = Costs({(0, "F"): 1.0, (0, "B"): 2.0, (0, "P"): 0.0, (0, "E"): 0.0}, host_bytes_per_us=size / 3.0)
    lists = with_transfers(schedule.orders, flow, costs)
    assert [str(line).split(":")[0] for line in lists[0]] == [
        "0P", "0F0", "OUT 0F0", "0F1", "OUT 0F1", "IN 0B0", "0F2", "OUT 0F2", "IN 0B1", "0B0", "IN 0B2", "0B1", "0B2",
        "0E",
    ]  # fmt: skip
    line = simulate(lists, flow, costs)
    at = {str(span.instruction).split(":")[0]: (span.start_us, span.end_us) for span in line.ranks[0]}
    # 0F1 ends at 2 and waits for OUT 0F0 until 4; then IN 0B0 and 0F2 start, which waits for OUT 0F1 until 7
    assert [at[name] for name in ("OUT 0F0", "OUT 0F1", "IN 0B0")] == [(1, 4), (4, 7), (4, 7)]
    assert at["0F2"] == (4, 5) and at["OUT 0F2"] == (7, 10) and at["IN 0B1"] == (7, 10)
    assert at["0B0"] == (7, 9) and at["IN 0B2"] == (10, 13) and at["0B1"] == (10, 12) and at["0B2"] == (13, 15)
    assert line.copied_us == ((2 + 2 + 1, 1),) and line.span_us == 15


PLAIN: dict[str, Any] = {"schedule": "1f1b", "microbatches": 8}


def test_a_picture_shows_what_arrives_from_the_host():
    found = case.compiled("deep", "pp=4", machine=case.SLOW, **PLAIN, **ON)
    assert found.pipeline is not None
    text = transfers_text(found, 0)
    held = [memory_of_rank(one, 0).activations for one in (case.compiled("deep", "pp=4", **PLAIN), found)]
    assert held[1] < held[0]  # what waits elsewhere is not on the device
    assert "into the host's memory" in text and "back from the host's memory, for it" in text
    lists, flow = found.pipeline.lists, found.pipeline.flow
    made: Timeline = simulate(lists, flow, found.pipeline.costs)
    texts = [message.text for message in picture(found.pipeline, made).lanes[0].messages]
    assert any(text.startswith("0B0 from the host's memory: %") for text in texts)
    assert Instruction("IN", Action(0, "B", 3), values=("x",)).runs == ()


@pytest.mark.parametrize("launch", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("link", [1e9, 12e9, 50e9, 1e12])
def test_what_the_budget_says_of_copies_is_what_the_simulator_says(link: float, launch: float):
    """One model of time: the budget of recomputation asks the streams that simulate the emitted program."""
    machine = replace(named(DEVICES), to_host=link, launch_us=launch)
    with torch.device("meta"):
        captured = capture(case.Deep(4, 512), case.squares, (torch.zeros(2048, 512),), {})
    plain, found = (lower(captured, mesh_of("dp=1"), options_of(**more), Fixed(machine=machine)) for more in ({}, ON))
    line = CallLine(plain.program, Ways("auto", machine))
    values = [node for node in line.nodes if node.name in kept_of(line).movable]
    longer = run(found.program, machine).total - run(plain.program, machine).total
    assert line.waits_us(values, first_uses(line, values)) == pytest.approx(longer, rel=0.01, abs=10 + 4 * launch)


@pytest.mark.parametrize(
    ("turn", "begins"), [(1, (1, 1)), (2, (1, 2)), (3, (2, 2)), (5, (4, 4))], ids=lambda value: str(value)
)
def test_a_copy_comes_back_a_turn_before_it_is_read(turn: int, begins: tuple[int, int]) -> None:
    """And not before the turn behind its forward, or one later where that sends it away."""
    line = Instruction("IN", Action(0, "B", 0))
    for stores, begin in zip(({}, {(0, "F"): {"kept": "host"}}), begins, strict=True):
        flow: Any = SimpleNamespace(stores=stores, copies=lambda line: {"read": "kept"})
        assert _begins(line, turn, {Action(0, "F", 0): 0}, flow) == begin
