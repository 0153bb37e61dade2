"""Traces: what the ranks of a run did, as files that ui.perfetto.dev and chrome://tracing open, and back again.

DIR/rank_0003.json   what one rank did, written by itself
DIR/trace.json       all of them, one track a rank, put together by rank 0
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError, TargetError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import KINDS, ONCE, Costs, Span, Timeline
from autopar.machines import Machine, named
from autopar.report.artifact.pipeline_json import parse_instruction, parse_run
from autopar.runtime.ranks.recorder import RUN, WAITED, Event, Recorder

MERGED = "trace.json"
FORMAT = "autopar trace"


def write_trace(folder: Path, compiled: Lowered, recorder: Recorder) -> Path:
    """Write what this rank did; rank 0 puts all together. Every rank must call it."""
    try:
        write_rank(folder, compiled, dist.get_rank(), recorder)
        dist.barrier()
        return merge_ranks(folder, compiled) if dist.get_rank() == 0 else folder / MERGED
    except OSError as error:
        raise TargetError(f"--trace {folder}: cannot write there: {error.strerror}.") from None


def write_rank(folder: Path, compiled: Lowered, rank: int, recorder: Recorder) -> None:
    """The trace of one rank; times are those of the machine's clock, so that ranks can be laid side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    offset = time.time() * 1e6 - time.perf_counter() * 1e6
    events = [*_names(compiled.mesh, rank), *(_json(event, rank, offset) for event in recorder.events)]
    content = _content(compiled, events)
    (folder / _file(rank)).write_text(json.dumps(content))


def merge_ranks(folder: Path, compiled: Lowered) -> Path:
    """Put the files of all ranks together that are there; the first event is at time 0."""
    events: list[dict[str, Any]] = []
    for rank in range(compiled.mesh.size):
        path = folder / _file(rank)
        if path.is_file():
            events += json.loads(path.read_text())["traceEvents"]
    start = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    (folder / MERGED).write_text(json.dumps(_content(compiled, events)))
    return folder / MERGED


def read_trace(folder: Path, compiled: Lowered) -> Timeline:
    """What the first rank of each stage did in the shortest of the steps that were traced.

    Raises TargetError for what is no trace, or not one of this pipeline.
    """
    pipeline, path = compiled.pipeline, folder / MERGED
    assert pipeline is not None
    content = read_events(folder, compiled)
    first = [compiled.mesh.rank({**dict.fromkeys(compiled.mesh.names, 0), **({PIPELINE: place} if place else {})})
             for place in range(pipeline.flow.size)]  # fmt: skip
    try:
        steps = _steps(content, first, pipeline)
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(
            f"--over {folder}: '{path}' has a wrong event, or one of stages that are cut otherwise: "
            f"{type(error).__name__} {error}."
        ) from None
    if not steps:
        raise TargetError(f"--over {folder}: '{path}' holds no whole step.")
    return min(steps, key=lambda timeline: timeline.span_us)


def machine_of(folder: Path) -> Machine | None:
    """The machine that a traced step was made for: stages are cut by its times. None where no trace says one."""
    try:
        return named(json.loads((folder / MERGED).read_text())["otherData"]["machine"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AutoparError):
        return None  # what is wrong with the file `read_trace` says


def read_events(folder: Path, compiled: Lowered) -> list[dict[str, Any]]:
    """The events of a trace. Raises TargetError for what is no trace, or not one of this mesh and pipeline."""
    path = folder / MERGED
    expected = _said(compiled)
    try:
        content = json.loads(path.read_text())
        found = content["otherData"]
        if found["format"] != FORMAT:
            raise KeyError("format")
        wrong = [f"{name} {found.get(name)} and not {value}" for name, value in expected.items()
                 if found.get(name) != value]  # fmt: skip
        events: list[dict[str, Any]] = content["traceEvents"]
    except OSError as error:
        raise TargetError(f"--over {folder}: cannot read '{path}': {error.strerror}. `autopar run --trace {folder}` "
                          f"writes it.") from None  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TargetError(f"--over {folder}: '{path}' is not a trace that `autopar run --trace` wrote.") from None
    if wrong:
        raise TargetError(f"--over {folder}: the trace is of another step: {', '.join(wrong)}.")
    return events


def measured_costs(pipeline: Pipeline, measured: Timeline) -> Costs:
    """The times that actions and pairs really took, in the median; of transfers the estimate."""
    found: dict[tuple[tuple[int, str], ...], list[float]] = {}
    for rank in range(len(measured.ranks)):
        for span in measured.runs(rank):
            keys = tuple((run.action.stage, run.action.kind) for run in span.instruction.runs)
            found.setdefault(keys, []).append(span.end_us - span.start_us)
    times = {keys: statistics.median(times) for keys, times in found.items()}
    alone = {keys[0]: us for keys, us in times.items() if len(keys) == 1}
    pairs = {(keys[0], keys[1]): us for keys, us in times.items() if len(keys) == 2}
    return replace(pipeline.costs, times_us={**pipeline.costs.times_us, **alone}, pairs_us=pairs)


def timeline_of(recorders: Sequence[Recorder], step: int = 0) -> Timeline:
    """What recorders saw in a step, one of each rank of a pipeline."""
    return Timeline(tuple(_ordered(_span(event) for event in recorder.events if event.step == step
                                   and event.kind == RUN and event.action) for recorder in recorders))  # fmt: skip


def _span(event: Event) -> Span:
    return Span(parse_run(event.name), event.start_us, event.end_us)


def _steps(events: Sequence[Mapping[str, Any]], ranks: list[int], pipeline: Pipeline) -> list[Timeline]:
    found: dict[int, list[list[Span]]] = {}
    for event in events:
        if event["ph"] != "X" or event["pid"] not in ranks or event["cat"] not in (*KINDS.values(), WAITED):
            continue
        spans = found.setdefault(int(event["args"]["step"]), [[] for _ in ranks])
        if event["cat"] == WAITED:
            line = parse_instruction(event["args"]["instruction"], pipeline.flow)
        else:
            line = parse_run(event["name"])
            if any((run.action.stage, run.action.kind) not in pipeline.flow.works for run in line.runs):
                raise ValueError(f"'{line}' is no action of this pipeline")
        spans[ranks.index(event["pid"])].append(
            Span(line, float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        )
    return [Timeline(tuple(map(_ordered, spans))) for spans in found.values() if all(spans)]


def _ordered(spans: Iterator[Span] | list[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span.start_us))


def _content(compiled: Lowered, events: list[dict[str, Any]]) -> dict[str, Any]:
    said = {"format": FORMAT, "machine": compiled.plan.fixed.machine.name, **_said(compiled)}
    return {"displayTimeUnit": "ms", "otherData": said, "traceEvents": events}


def _said(compiled: Lowered) -> dict[str, Any]:
    """What a trace is of."""
    pipeline = compiled.pipeline
    said: dict[str, Any] = {"mesh": str(compiled.mesh)}
    if pipeline is not None:
        said |= {"schedule": pipeline.schedule, "microbatches": pipeline.microbatches, "stages": pipeline.flow.stages}
    return said


def _names(mesh: Mesh, rank: int) -> list[dict[str, Any]]:
    where = ",".join(f"{axis}={place}" for axis, place in mesh.coord(rank).items())
    kinds = {"process_name": {"name": f"rank {rank} ({where})"}, "process_sort_index": {"sort_index": rank},
             "thread_name": {"name": f"rank {rank}"}}  # fmt: skip
    return [{"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args} for name, args in kinds.items()]


def _json(event: Event, rank: int, offset: float) -> dict[str, Any]:
    """A complete event of the trace-event format; those within others are drawn below them."""
    action = event.action
    args: dict[str, Any] = {"step": event.step}
    name = event.name
    if action is not None:
        args |= {"stage": action.stage} if action.kind in "FBIW" else {}
        args |= {"microbatch": action.microbatch} if action.microbatch != ONCE else {}
        name = f"{event.name} in {action}" if not event.text and event.kind != RUN else event.name
    args |= {"instruction": event.text} if event.text else {}
    args |= {"module": event.module} if event.module else {}
    args |= {"bytes": event.bytes} if event.bytes else {}
    kind = KINDS[action.kind] if event.kind == RUN and action is not None else event.kind
    return {"ph": "X", "name": name, "cat": kind, "ts": event.start_us + offset,
            "dur": round(event.end_us - event.start_us, 3), "pid": rank, "tid": 0, "args": args}  # fmt: skip


def _file(rank: int) -> str:
    return f"rank_{rank:04}.json"
