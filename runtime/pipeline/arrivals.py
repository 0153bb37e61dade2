"""What has surely been received, by the order of the instructions: its memory is given back without asking."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from autopar.ir.schedule import ONCE, Flow, Instruction


def arrivals(
    lists: Sequence[Sequence[Instruction]], flow: Flow, rank: int
) -> Mapping[int, tuple[Instruction, ...]]:  # fmt: skip
    """The SENDs of a rank that are known to be received when what a RECV of it brings is there, by the place of that
    RECV in its list: the other rank waited for them before it sent that. Each is told at the first such RECV."""
    own, found = lists[rank], defaultdict[int, list[Instruction]](list)
    for peer in {line.peer for line in own if line.op == "SEND"}:
        needed = _needed(lists[peer], rank, flow)
        sent = {_message(line): at for at, line in _of(lists[peer], "SEND", rank)}
        answers = [(at, sent[_message(line)]) for at, line in _of(own, "RECV", peer)]
        latest = list(accumulate((after for _, after in answers), max))  # of all answers so far
        for _, line in _of(own, "SEND", peer):
            first = bisect_left(latest, needed[_message(line)])
            if first < len(answers):
                found[answers[first][0]].append(line)
    return {at: tuple(lines) for at, lines in found.items()}


def _of(lines: Sequence[Instruction], op: str, peer: int) -> Iterator[tuple[int, Instruction]]:
    return ((at, line) for at, line in enumerate(lines) if line.op == op and line.peer == peer)


def _message(line: Instruction) -> tuple[object, ...]:
    """What is the same of a SEND and its RECV."""
    return line.action, line.values


def _needed(lines: Sequence[Instruction], sender: int, flow: Flow) -> dict[tuple[object, ...], int]:
    """The place in a rank's list where it waits for each message of a sender: where a value of it is first read."""
    coming, needed = dict[tuple[str, int], tuple[object, ...]](), dict[tuple[object, ...], int]()
    step = flow.step_values()
    for at, line in enumerate(lines):
        names = [(name, ONCE if name in step else line.action.microbatch) for name in line.values]
        if line.op == "RECV":
            coming |= dict.fromkeys(names, _message(line)) if line.peer == sender else {}
            continue
        reads = names if line.op == "SEND" else [key for run in line.runs for key in flow.reads_of(run.action)]
        for message in {coming[key] for key in reads if key in coming}:
            needed.setdefault(message, at)
        coming = {key: message for key, message in coming.items() if message not in needed}
    return needed
