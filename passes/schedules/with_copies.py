"""with_copies: the instructions of a rank -> with those that copy values into the host's memory, and back in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.ir.schedule import IN, OUT, Action, Flow, Instruction

Lines = Sequence[Instruction]


def with_copies(lines: Lines, flow: Flow) -> Lines:
    """Put the copies of a flow between the turns of a rank, of three micro-batches:

        0F0 0F1 0F2 0B0 0B1 0B2
    becomes
        0F0, OUT 0F0: %x_host0, 0F1, OUT 0F1: %x_host0, IN 0B0: %x_back0B, 0F2, ..., IN 0B1: %x_back0B, 0B0, ...

    An OUT stands behind the forward action, and the device's memory is free when the next turn has ended
    (`copies_ended`). An IN stands a turn ahead of the action that reads it, but not before its OUT has given the memory
    back, since a value would be there twice.
    """
    if not flow.stores and not flow.loads:
        return lines
    places = [place for place, line in enumerate(lines) if line.op == "RUN"]
    number_of = {run.action: number for number, place in enumerate(places) for run in lines[place].runs}
    before, behind = defaultdict[int, list[Instruction]](list), defaultdict[int, list[Instruction]](list)
    for action, number in number_of.items():
        key = action.stage, action.kind
        if key in flow.stores:
            behind[places[number]].append(_copy(OUT, action, flow, flow.stores[key]))
        if key in flow.loads:
            line = _copy(IN, action, flow, flow.loads[key])
            before[places[_begins(line, number, number_of, flow)]].append(line)
    return [one for place, line in enumerate(lines) for one in (*before[place], line, *behind[place])]


def _copy(op: str, action: Action, flow: Flow, copies: Mapping[str, str]) -> Instruction:
    values = tuple(copies)
    return Instruction(op, action, values=values, types=flow.types_of(action, values))


def _begins(line: Instruction, number: int, number_of: Mapping[Action, int], flow: Flow) -> int:
    """The turn before which a copy back starts, for the one with a number."""
    forward = Action(line.action.stage, "F", line.action.microbatch)
    stored = flow.stores.get((forward.stage, "F"), {})
    goes_out = any(name in stored for name in flow.copies(line).values())
    return min(number, max(number - 1, number_of[forward] + (2 if goes_out else 1)))
