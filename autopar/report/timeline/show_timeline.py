"""The timeline of a compiled pipeline, where a command wants it: in the terminal or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.compiler.lowered import Lowered
from autopar.errors import TargetError
from autopar.ir.program import record
from autopar.ir.schedule import ONCE, Action
from autopar.passes.schedules import simulate
from autopar.report.timeline.picture import Lane, Picture, TimeBlock, picture, time_text
from autopar.report.timeline.svg import timeline_svg
from autopar.report.timeline.timeline_page import timeline_page
from autopar.report.timeline.trace import MERGED, measured_costs, read_events, read_trace
from autopar.runtime.ranks.recorder import COLLECTIVE, OTHER

Event = Mapping[str, Any]


def picture_of(compiled: Lowered, over: Path | None = None) -> Picture:
    """The simulated step of a pipeline. over: the folder of a trace; then the simulation takes the times of actions
    from there, and what was measured is drawn below it: what differs is waiting. Of one graph what was measured is all
    that is drawn."""
    pipeline = compiled.pipeline
    if pipeline is None and over is not None:
        return measured_picture(compiled, over)
    if pipeline is None:
        raise TargetError(
            f"the step on mesh {compiled.mesh} is one graph, and only the times of a pipeline are simulated: draw what "
            f"`autopar run --trace DIR` saw with --over DIR, or give the mesh an axis pp."
        )
    if over is None:
        return picture(pipeline, simulate(pipeline.lists, pipeline.flow, pipeline.costs))
    measured = read_trace(over, compiled)
    costs = measured_costs(pipeline, measured)
    return picture(pipeline, simulate(pipeline.lists, pipeline.flow, costs), measured)


def write_timeline(shown: Picture, path: Path, title: str) -> int:
    """An SVG or an HTML file by its name; its size in bytes."""
    makers = {".svg": lambda: timeline_svg(shown), ".html": lambda: timeline_page(shown, title)}
    if path.suffix not in makers:
        raise TargetError(f"--timeline-file {path}: write a name that ends in .svg or .html.")
    content = makers[path.suffix]().encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TargetError(f"--timeline-file {path}: cannot write it: {error.strerror}.") from None
    return len(content)


# -- a measured timeline ----------------------------------------------------------------------------------------------


def measured_picture(compiled: Lowered, folder: Path) -> Picture:
    """A lane for each rank: the shortest of the traced steps. A stretch between two collectives is of the phase of the
    second; in the strip below it are the collectives themselves, in which a rank computes nothing.

    Raises TargetError for what is no trace, or not one of this mesh.
    """
    events = read_events(folder, compiled)
    try:
        steps = [found for step in _steps(events) if (found := _ranks(events, step, compiled.mesh.size))]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        where = f"'{folder / MERGED}' has a wrong event: {type(error).__name__} {error}"
        raise TargetError(f"--over {folder}: {where}.") from None
    if not steps:
        raise TargetError(f"--over {folder}: '{folder / MERGED}' holds no whole step of {compiled.mesh.size} ranks.")
    ranks = min(steps, key=lambda ranks: max(whole["dur"] for whole, _ in ranks))
    start = min(whole["ts"] for whole, _ in ranks)
    phases = {node.name: record(node).phase for node in compiled.program.nodes if node.op == "call_function"}
    lanes = tuple(_lane(rank, whole, moves, start, phases) for rank, (whole, moves) in enumerate(ranks))
    length = max(whole["ts"] + whole["dur"] for whole, _ in ranks) - start
    idle = sum(lane.idle for lane in lanes) / len(lanes)
    text = f"measured: {time_text(length)} forward and backward, {idle:.1%} of it in collectives"
    return Picture(lanes, length, (f"mesh {compiled.mesh}: {compiled.mesh.size} ranks", text), 1)


def _steps(events: Iterable[Event]) -> list[int]:
    return sorted({int(event["args"]["step"]) for event in events if event["ph"] == "X"})


def _ranks(events: Sequence[Event], step: int, size: int) -> list[tuple[Event, list[Event]]]:
    """(the whole step, the collectives in it) of each rank; empty if one has no such step."""
    mine = [event for event in events if event["ph"] == "X" and event["args"]["step"] == step]
    whole = {event["pid"]: event for event in mine if event["cat"] == OTHER and event["name"] == f"step {step}"}
    if set(whole) != set(range(size)):
        return []
    moves: dict[int, list[Event]] = {rank: [] for rank in range(size)}
    for event in mine:
        if event["cat"] == COLLECTIVE:
            moves[event["pid"]].append(event)
    return [(whole[rank], sorted(moves[rank], key=lambda event: float(event["ts"]))) for rank in range(size)]


def _lane(rank: int, whole: Event, moves: Sequence[Event], start: float, phases: Mapping[str, str]) -> Lane:
    place, end = whole["ts"] - start, whole["ts"] + whole["dur"] - start
    blocks, messages, waited = [], [], 0.0
    for event in moves:
        begin, stop = event["ts"] - start, event["ts"] + event["dur"] - start
        backward = phases.get(event["name"].rpartition("%")[2], "backward") != "forward"
        if begin > place:
            blocks.append(_block(rank, "B" if backward else "F", place, begin))
        messages.append(_block(rank, "B" if backward else "F", begin, stop, _text(event)))
        place, waited = max(place, stop), waited + event["dur"]
    if end > place:
        blocks.append(_block(rank, "B", place, end))
    return Lane(rank, tuple(blocks), tuple(messages), waited / max(whole["dur"], 1e-9))


def _block(rank: int, kind: str, start: float, end: float, text: str = "") -> TimeBlock:
    return TimeBlock(Action(rank, kind, ONCE), start, end, text or {"F": "forward", "B": "backward"}[kind])


def _text(event: Event) -> str:
    size = event["args"].get("bytes")
    return event["name"] + (f" ({size:,} bytes)" if size else "")
