"""How many messages a rank of a pipeline has in hand in each turn: by the instructions that the compiler writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.ir.schedule import Action, Costs, Flow, Instruction
from autopar.passes.schedules import Orders, with_transfers
from autopar.runtime.pipeline.arrivals import arrivals


class HeldMessages(NamedTuple):
    """While an action runs, behind it of a forward pass. coming: that were asked for and not read before; what a
    forward pass has read counts as saved. leaving: that are not known to have arrived."""

    coming: int = 0
    leaving: int = 0


NO_MESSAGES = HeldMessages()


def held_messages(orders: Orders, flow: Flow) -> Mapping[Action, HeldMessages]:
    """flow: of a pipeline whose actions read and write values of the micro-batch alone. As where no times are known."""
    lists = with_transfers(orders, flow, Costs(), prefetch=True)
    found: dict[Action, HeldMessages] = {}
    for rank, lines in enumerate(lists):
        found |= _of_rank(lines, flow, arrivals(lists, flow, rank))
    return found


def _of_rank(
    lines: Sequence[Instruction], flow: Flow, arrived: Mapping[int, tuple[Instruction, ...]]
) -> dict[Action, HeldMessages]:  # fmt: skip
    """arrived: by the place of a RECV, the SENDs that have left when it is read."""
    coming, leaving = dict[tuple[str, int], int](), set[tuple[Action, int]]()
    found: dict[Action, HeldMessages] = {}
    for at, line in enumerate(lines):
        if line.op == "RECV":
            coming |= {(name, line.action.microbatch): at for name in line.values}
            continue
        if line.op == "SEND":
            leaving.add((line.action, line.peer))
            if line.action.kind == "F":
                found[line.action] = found[line.action]._replace(leaving=len(leaving))
            continue
        for run in line.runs:
            reads = [key for key in flow.reads_of(run.action) if key in coming]
            for key in reads:
                leaving -= {(sent.action, sent.peer) for sent in arrived.get(coming[key], ())}
            is_read = len(reads) * (run.action.kind == "F")
            found[run.action] = HeldMessages(len(coming) - is_read, len(leaving))
            coming = {key: place for key, place in coming.items() if key not in reads}
    return found
