"""Traces: what a recorder sees on the virtual mesh and on processes, as files, and laid over a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import mlp

import autopar
from autopar.compiled import Compiled
from autopar.errors import TargetError
from autopar.ir.layout import local_part
from autopar.ir.ops.ops import is_collective
from autopar.report.timeline.show_timeline import picture_of
from autopar.report.timeline.trace import MERGED, measured_costs, merge_ranks, read_trace, timeline_of, write_rank
from autopar.runtime.executor.inputs import inputs_of, slots_of
from autopar.runtime.pipeline.microbatches import ExecutorGraph
from autopar.runtime.pipeline.run_pipeline import compile_rank
from autopar.runtime.ranks.recorder import COLLECTIVE, OTHER, POSTED, PROFILER, RUN, WAITED, Event, Recorder
from autopar.runtime.ranks.runner import ExecutorRunner, PipelineRunner
from autopar.runtime.ranks.virtual import VirtualMesh


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model, loss_fn, batch = mlp()
    return autopar.compile(model, "pp=2,tp=2", loss_fn=loss_fn, batch=batch, microbatches=4, schedule="1f1b")


@pytest.fixture(scope="module")
def recorders(compiled: Compiled) -> list[Recorder]:
    """Of every rank, of two steps on zeros."""
    program, pipeline = compiled.program, compiled.pipeline
    assert pipeline is not None

    def part_of(entry: Any, layout: Any, coord: Any) -> torch.Tensor:
        node = program.placeholders[program.inputs.index(entry)]
        type_ = node.meta["autopar"].type
        return local_part(torch.zeros(type_.shape, dtype=type_.dtype), layout, program.mesh, coord)

    made = [Recorder() for _ in range(compiled.mesh.size)]
    codes = [compile_rank(pipeline, place) for place in range(2)]
    for step in range(2):
        given = [inputs_of(slots_of(program, pipeline, coord), part_of) for coord in compiled.mesh.coords()]
        for one in made:
            one.step = step
        VirtualMesh(compiled.mesh).run_pipeline(codes, given, made)
    return made


def test_a_device_that_works_apart_is_waited_for_before_each_time_is_taken() -> None:
    waits: list[int] = []
    made = Recorder(lambda: waits.append(1))
    with made.timed("optimizer"):
        assert len(waits) == 1
    assert len(waits) == 2


def test_a_recorder_sees_all_that_a_rank_does(compiled: Compiled, recorders: list[Recorder]):
    assert compiled.pipeline is not None
    for rank, one in enumerate(recorders):
        lines = compiled.pipeline.lists[rank // 2]
        mine = [event for event in one.events if event.step == 1]
        assert [event.name for event in mine if event.kind == RUN] == [str(line) for line in lines if line.op == "RUN"]
        assert [event.text for event in mine if event.kind == POSTED] == [
            str(line) for line in lines if line.op != "RUN"
        ]
        received = {str(line) for line in lines if line.op == "RECV"}
        assert {event.text for event in mine if event.kind == WAITED} == received
        moved = sum(row.times for row in compiled.collectives if row.place == rank // 2)
        assert len([event for event in mine if event.kind == COLLECTIVE and "wait" not in event.name]) == moved > 0
        assert all(event.start_us <= event.end_us for event in mine)
        assert all(event.action is not None and event.bytes for event in mine if event.kind == COLLECTIVE)


def test_waiting_is_no_part_of_an_action(recorders: list[Recorder]):
    for one in recorders:
        runs = [event for event in one.events if event.kind == RUN]
        for wait in (event for event in one.events if event.kind == WAITED):
            assert not any(run.start_us < wait.end_us and wait.start_us < run.end_us for run in runs)


@pytest.fixture
def folder(compiled: Compiled, recorders: list[Recorder], tmp_path: Path) -> Path:
    for rank, one in enumerate(recorders):
        write_rank(tmp_path / "trace", compiled, rank, one)
    merge_ranks(tmp_path / "trace", compiled)
    return tmp_path / "trace"


def test_the_file_is_in_the_trace_event_format(compiled: Compiled, folder: Path):
    content = json.loads((folder / MERGED).read_text())
    events = content["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 (pp=0,tp=0)", 1: "rank 1 (pp=0,tp=1)", 2: "rank 2 (pp=1,tp=0)", 3: "rank 3 (pp=1,tp=1)"}
    timed = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in timed) == 0 and all(event["dur"] >= 0 for event in timed)
    backward = next(event for event in timed if event["name"] == "1B3")
    assert (backward["cat"], backward["args"]) == ("backward", {"step": 0, "stage": 1, "microbatch": 3})
    inside = [event for event in timed if event["cat"] == "collective"]
    assert inside and all(" in " in event["name"] and event["args"]["bytes"] for event in inside)
    assert dropped_by_perfetto(events) == []


def dropped_by_perfetto(events: list[dict[str, Any]]) -> list[str]:
    """The complete events that Perfetto leaves out (`slice_drop_overlapping_complete_event` of its statistics): those
    that begin within an open one of their track and end after it, if by a nanosecond."""
    dropped, tracks = [], {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    for track in tracks:
        mine = [(round(event["ts"] * 1000), round(event["dur"] * 1000), event["name"]) for event in events
                if event["ph"] == "X" and (event["pid"], event["tid"]) == track]  # fmt: skip
        open_: list[int] = []
        for start, length, name in sorted(mine, key=lambda each: (each[0], -each[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            if open_ and start + length > open_[-1]:
                dropped.append(name)
            else:
                open_.append(start + length)
    return dropped


def test_a_trace_is_read_back(compiled: Compiled, recorders: list[Recorder], folder: Path):
    measured = read_trace(folder, compiled)
    assert compiled.pipeline is not None
    for place in range(2):
        runs = [str(line) for line in compiled.pipeline.lists[place] if line.op == "RUN"]
        assert [str(span.instruction) for span in measured.runs(place)] == runs
    steps = [timeline_of([recorders[0], recorders[2]], step).span_us for step in range(2)]
    assert measured.span_us == pytest.approx(min(steps), rel=0.01, abs=5)
    costs = measured_costs(compiled.pipeline, measured)
    assert set(costs.times_us) == set(compiled.pipeline.flow.works)
    shown = picture_of(compiled, folder)
    assert [lane.name for lane in shown.lanes] == ["rank 0", "measured", "rank 1", "measured"]
    assert shown.captions[2].startswith("measured: ") and shown.lanes[1].idle == measured.bubble(0)


def test_what_is_no_trace_of_this_pipeline(compiled: Compiled, folder: Path, tmp_path: Path):
    with pytest.raises(TargetError, match=r"cannot read .*: No such file.* `autopar run --trace "):
        read_trace(tmp_path / "none", compiled)
    model, loss_fn, batch = mlp()
    other = autopar.compile(model, "pp=2", loss_fn=loss_fn, batch=batch, microbatches=2, schedule="gpipe")
    with pytest.raises(TargetError, match=r"another step: mesh pp=2,tp=2 and not pp=2, schedule 1f1b and not gpipe,"):
        read_trace(folder, other)
    path = folder / MERGED
    text = path.read_text()
    path.write_text("[]")
    with pytest.raises(TargetError, match="is not a trace that"):
        read_trace(folder, compiled)
    path.write_text(text.replace('"name": "0F0"', '"name": "zero"'))
    with pytest.raises(
        TargetError,
        match=r"wrong event, or one of .*: ValueError 'zero' is not an action",
    ):
        read_trace(folder, compiled)
    path.write_text(text.replace('"name": "0F0"', '"name": "7F0"'))
    with pytest.raises(
        TargetError,
        match=r"wrong event, or one of .*: ValueError '7F0' is no action of this pipeline",
    ):
        read_trace(folder, compiled)
    content = json.loads(text)
    content["traceEvents"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(TargetError, match="holds no whole step"):
        read_trace(folder, compiled)


@pytest.fixture
def split(tmp_path: Path) -> tuple[Compiled, Path]:
    """A step without a pipeline, and a trace of two steps: each collective of the second takes 10 us after 30 us of
    work, and a tenth longer on rank 1; those of the first twice as long."""
    model, loss_fn, batch = mlp()
    compiled = autopar.compile(model, "tp=2", loss_fn=loss_fn, batch=batch)
    moves = [node for node in compiled.program.nodes if is_collective(node.target)]
    for rank in range(2):
        one = Recorder()
        for step, slow in ((0, 2.0), (1, 1.0 + rank / 10)):
            for i, node in enumerate(moves):
                start = 1000.0 * step + 40 * slow * i + 30
                one.events.append(
                    Event(COLLECTIVE, f"all_reduce tp %{node.name}", start, start + 10 * slow, step, bytes=64)
                )
            one.events.append(Event(OTHER, f"step {step}", 1000.0 * step, 1000 * step + 40 * slow * len(moves), step))
        write_rank(tmp_path, compiled, rank, one)
    merge_ranks(tmp_path, compiled)
    return compiled, tmp_path


def test_one_graph_is_drawn_as_it_was_measured(split: tuple[Compiled, Path]):
    compiled, folder = split
    shown = picture_of(compiled, folder)
    count = len(compiled.collectives)
    # The ranks read the machine's clock one after the other.
    assert 44 * count - 0.1 <= shown.end_us < 80 * count and shown.captions[0] == "mesh tp=2: 2 ranks"
    assert shown.captions[1].endswith("forward and backward, 25.0% of it in collectives")
    for lane in shown.lanes:
        kinds = [block.action.kind for block in lane.blocks]
        assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"F", "B"}
        assert [block.text for block in lane.messages] == [
            f"all_reduce tp %{node.name} (64 bytes)" for node in compiled.program.nodes if is_collective(node.target)
        ]
        assert lane.idle == pytest.approx(0.25, abs=0.001)
        assert sum(block.end_us - block.start_us for block in lane.messages) == pytest.approx(
            0.25 * 40 * (1 + lane.rank / 10) * count, abs=0.1
        )


def test_what_is_no_trace_of_this_graph(split: tuple[Compiled, Path]):
    compiled, folder = split
    path = folder / MERGED
    text = path.read_text()
    path.write_text(text.replace('"step 0"', '"nothing"').replace('"step 1"', '"nothing"'))
    with pytest.raises(TargetError, match="holds no whole step of 2 ranks"):
        picture_of(compiled, folder)
    path.write_text(text.replace('"cat"', '"kind"'))
    with pytest.raises(TargetError, match="has a wrong event: KeyError 'cat'"):
        picture_of(compiled, folder)
    path.write_text(text.replace('"tp=2"', '"tp=4"'))
    with pytest.raises(TargetError, match="another step: mesh tp=4 and not tp=2"):
        picture_of(compiled, folder)
    with pytest.raises(TargetError, match="the step on mesh tp=2 is one graph"):
        picture_of(compiled)


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_who_sees_what_a_runner_does(is_pipeline: bool) -> None:
    """A recorder sees requests; the profiler, names of what runs; and nobody once it is told so."""
    driver: Any = SimpleNamespace(recorder=None)
    executable: Any = SimpleNamespace(is_named=False)
    code: Any = SimpleNamespace(graphs={(0, "F", 0): ExecutorGraph(executable, ())})
    device, recorder = torch.device("cpu"), Recorder()
    runner = PipelineRunner(code, driver, (), device) if is_pipeline else ExecutorRunner(executable, driver)
    for given, seen, is_named in ((recorder, recorder, False), (PROFILER, None, True), (None, None, False)):
        runner.record(given)
        assert (driver.recorder, executable.is_named) == (seen, is_named)
