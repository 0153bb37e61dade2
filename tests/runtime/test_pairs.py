"""Two actions of a pipeline side by side: the same bits as one behind the other, in an order that all ranks have."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from mixtures import Kind, mixture_case

import autopar
from autopar.api import Compiled
from autopar.capture import capture
from autopar.compiler.meshes import mesh_of
from autopar.errors import ScheduleError
from autopar.ir.in_turns import in_turns
from autopar.ir.options import StepOptions
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.schedule import Action, Instruction, Pair
from autopar.machines.files import named
from autopar.passes import make_pipeline, run_passes
from autopar.passes.costs.streams import run
from autopar.passes.schedules import check_schedule
from autopar.planning.price.pipeline_time import emitted_costs
from autopar.report.artifact.pipeline_json import parse_run, print_instruction
from autopar.report.timeline.picture import picture
from autopar.report.timeline.trace import timeline_of
from autopar.runtime.pipeline.run_pipeline import Finals, compile_rank
from autopar.runtime.ranks.recorder import COLLECTIVE, Recorder
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.verification.virtual_inputs import scattered
from autopar.verification.virtual_side import Virtual

SEED = torch.tensor([3, 5])
# Of each the blocks of the model: one for each stage.
WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("pp=2,ep=2", 4, {"microbatches": 4}),
    ("ep=2", 2, {"microbatches": 4}),  # no pipeline: the halves of the model hide each other's rows
    ("pp=2,dp=2", 4, {"microbatches": 4, "zero": 3}),
    ("pp=2,tp=2", 4, {"microbatches": 4, "sequence_parallel": True, "recompute": "full"}),
    ("pp=2,ep=2", 4, {"microbatches": 4, "offload": "activations"}),
]


@cache
def _made(way: int) -> tuple[Compiled, list[Any]]:
    """A step in float64 with pairs, and what every rank is given."""
    mesh, blocks, options = WAYS[way]
    model, batch = mixture_case(Kind(blocks=blocks, experts=4))
    model, loss_fn = model.double(), (lambda model, *args: model(*args))
    captured = capture(model, loss_fn, batch, {}, lift=torch.float64)
    plan = Plan(mesh_of(mesh), options=StepOptions(schedule="dualpipev", **options))
    history = run_passes(captured.program, plan)
    found = Compiled(plan, history, make_pipeline(history[-1][1], plan))
    whole = Virtual(model, captured, found, lambda p: torch.optim.SGD(p, lr=0.1)).whole(batch, {}, SEED)
    return found, scattered(found.program, found.pipeline, found.mesh, [whole])


def _run(found: Compiled, pipeline: Pipeline, given: list[Any]) -> tuple[list[Finals], list[Recorder]]:
    codes = [compile_rank(pipeline, rank) for rank in range(pipeline.flow.size)]
    recorders = [Recorder() for _ in given]
    copies = [{key: value.clone() for key, value in inputs.items()} for inputs in given]
    return VirtualMesh(found.mesh).run_pipeline(codes, copies, recorders), recorders


def _apart(pipeline: Pipeline) -> Pipeline:
    """The same lists, with the actions of each pair one behind the other."""
    return pipeline.with_(
        lists=tuple(tuple(one for line in lines for one in line.runs or (line,)) for lines in pipeline.lists)
    )


@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: str(WAYS[way]))
def test_a_pair_gives_the_bits_of_its_actions(way: int):
    found, given = _made(way)
    pipeline = found.pipeline
    assert pipeline is not None
    pairs = [line for lines in pipeline.lists for line in lines if line.beside is not None]
    assert len(pairs) >= 2 * pipeline.flow.size
    check_schedule(_apart(pipeline).lists, pipeline.flow)
    both, recorders = _run(found, pipeline, given)
    alone, others = _run(found, _apart(pipeline), given)
    for mine, its in zip(both, alone, strict=True):
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[key], its[key]) for key in mine)
    # what is asked of other ranks is the same, and it is asked in another order: something went on beside it
    for mine, its in zip(recorders, others, strict=True):
        asked, before = ([event.name for event in one.events if event.kind == COLLECTIVE] for one in (mine, its))
        assert sorted(asked) == sorted(before)
        assert asked != before


@pytest.mark.parametrize(("mesh", "blocks", "options"), [*WAYS[:3], ("pp=4,ep=2", 8, {"microbatches": 8})], ids=str)
def test_a_step_of_pairs_is_that_of_the_module(mesh: str, blocks: int, options: dict[str, Any]):
    model, batch = mixture_case(Kind(blocks=blocks, experts=4))
    batch = tuple(torch.cat([x, x.flip(1)]) for x in batch)
    report = autopar.verify(model, mesh, batch=batch, schedule="dualpipev", steps=2, **options)
    assert report.ok, report


def test_texts_and_pictures_of_pairs():
    found, given = _made(0)
    pipeline = found.pipeline
    assert pipeline is not None
    line = next(line for line in pipeline.lists[0] if line.beside is not None)
    assert str(line) == f"{line.action} beside {line.beside.action}"
    assert parse_run(print_instruction(line)) == line
    _, recorders = _run(found, pipeline, given)
    measured = timeline_of(recorders[:: len(recorders) // 2])
    runs = [line.turn for line in pipeline.lists[0] if line.op == "RUN"]
    assert [span.instruction.turn for span in measured.runs(0)] == runs
    blocks = picture(pipeline, measured).lanes[0].blocks
    rows = [(str(block.action), block.row, block.rows) for block in blocks if block.rows == 2]
    assert rows[:2] == [(str(line.action), 0, 2), (str(line.beside.action), 1, 2)]


def test_a_pair_takes_less_than_its_actions_where_links_are_slow():
    """On GPUs rows move while the other computes; cores that are the devices move data themselves."""
    found, _ = _made(0)
    pipeline = found.pipeline
    assert pipeline is not None
    pair = next(line.turn for line in pipeline.lists[0] if line.beside is not None)
    gpu = emitted_costs(pipeline, named("h100-80g"))
    first, second = (gpu.ran(action) for action in pair.actions)
    assert max(first.total, second.total) <= gpu.time_us(pair) < first.total + second.total
    assert gpu.ran(pair).computed >= 0.99 * (first.computed + second.computed)
    cpu = emitted_costs(pipeline, replace(named("h100-80g"), is_host=True))
    assert cpu.time_us(pair) == pytest.approx(sum(map(cpu.time_us, pair.actions)))
    assert run(pipeline.graph(pair.first), named("h100-80g")).total == first.total


def test_nothing_to_hide_is_no_pair():
    """A pipeline alone waits for nothing in its graphs; then a pair would only send later."""
    model, batch = mixture_case(Kind(blocks=4, experts=4))
    found = autopar.compile(model, "pp=2", batch=batch, microbatches=4, schedule="dualpipev")
    assert found.pipeline is not None
    assert not any(line.beside for lines in found.pipeline.lists for line in lines)


def test_a_pair_reads_nothing_of_itself():
    table = "0F0,(0F1;0B1)OVERLAP_F_B,0B0\n"
    model, batch = mixture_case(Kind(blocks=2, experts=4))
    with pytest.raises(ScheduleError, match=r"rank 0 waits at \(0F1;0B1\)OVERLAP_F_B for 0F1 of rank 0"):
        autopar.compile(model, "ep=2", batch=batch, microbatches=2, schedule=table)
    found, _ = _made(1)
    pipeline = found.pipeline
    assert pipeline is not None
    lines = list(pipeline.lists[0])
    runs = [i for i, line in enumerate(lines) if line.op == "RUN" and line.action.kind in "FI"]
    at = next(i for i in runs if lines[i].beside is None and lines[i].action == Action(0, "F", 0))
    after = next(i for i in runs if lines[i].action == Action(1, "F", 0))
    lines[after] = replace(lines[at], beside=lines[after])
    del lines[at]
    with pytest.raises(ScheduleError, match=r"\(0F0 beside 1F0\): it reads %\S+, which is not there"):
        check_schedule([lines], pipeline.flow)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=str)
def test_two_of_one_stage_add_to_the_same_sums(options: dict[str, Any]):
    """Backwards of two micro-batches side by side: both begin with no sum, and nothing of either is lost. What both
    read for the last time (parameters that were cast once) is there for both."""
    table = "0F0,0F1,(0B0;0B1)OVERLAP_F_B\n"
    model, batch = mixture_case(Kind(blocks=2, experts=4))
    report = autopar.verify(model, "ep=2", batch=batch, microbatches=2, schedule=table, steps=2, **options)
    assert report.ok, report


def test_each_goes_on_while_the_other_waits():
    def steps(name: str, texts: str) -> Generator[Any, Any, str]:
        for text in texts:
            answer = yield name + text
            assert answer == f"{name}{text}!"
        return name

    both, said, answer = in_turns((steps("a", ".w..w."), steps("b", "w.w")), lambda text: text[1] == "w"), [], None
    try:
        while True:
            said.append(both.send(answer))
            answer = f"{said[-1]}!"
    except StopIteration as done:
        assert done.value == ("a", "b")
    # `a` waits: `b` begins and waits too, so `a` has its answer, and goes on to its next wait
    assert said == ["a.", "aw", "a.", "a.", "bw", "b.", "aw", "a.", "bw"]


def test_instructions_of_pairs():
    pair = Instruction("RUN", Action(0, "F", 3), beside=Instruction("RUN", Action(1, "B", 1)))
    assert pair.turn == Pair(Action(0, "F", 3), Action(1, "B", 1))
    assert [str(run) for run in pair.runs] == ["0F3", "1B1"]
    assert Instruction("SEND", Action(0, "F", 3), 1).runs == ()
