"""What the ranks of one graph did in a step, from a trace: computing, and waiting for collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.compiler.lowered import Lowered
from autopar.errors import TargetError
from autopar.ir.program import record
from autopar.ir.schedule import ONCE, Action
from autopar.report.timeline.picture import Lane, Picture, TimeBlock, time_text
from autopar.report.timeline.trace import MERGED, read_events
from autopar.runtime.ranks.recorder import COLLECTIVE, OTHER

Event = Mapping[str, Any]


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
