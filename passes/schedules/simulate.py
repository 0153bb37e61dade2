"""simulate: instructions and the times of their actions -> when each rank does what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from autopar.errors import ScheduleError
from autopar.ir.schedule import ONCE, Action, Flow, Instruction, Span, Timeline, Times, Turn


def simulate(lists: Sequence[Sequence[Instruction]], flow: Flow, costs: Times) -> Timeline:
    """Replay checked lists (`check_schedule`) with asynchronous transfers.

    A SEND starts when its action has ended and arrives `transfer_us` later, beside all other transfers; neither rank
    stands still for it. A turn starts when the one before it has ended and all it reads has arrived.
    """
    step = flow.step_values()
    spans: list[list[Span]] = [[] for _ in lists]
    clock = [0.0] * len(lists)
    ended: list[dict[Action, float]] = [{} for _ in lists]
    arrived: list[dict[tuple[str, int], float]] = [{} for _ in lists]
    on_way: dict[tuple[int, int], deque[Span]] = {}
    at = [0] * len(lists)
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(lists[rank]):
            line = lists[rank][at[rank]]
            action = line.action
            if line.op == "RUN":
                start, turn = clock[rank], line.turn
                if arrived[rank]:
                    reads = (key for one in turn.actions for key in flow.reads_of(one))
                    start = max(start, *(arrived[rank].get(key, 0.0) for key in reads), 0.0)
                clock[rank] = start + costs.time_us(turn)
                ended[rank].update(dict.fromkeys(turn.actions, clock[rank]))
                spans[rank].append(Span(line, start, clock[rank]))
            elif line.op == "SEND":
                start = ended[rank].get(action, 0.0)  # what was there before the step is sent at its beginning
                span = Span(line, start, start + costs.transfer_us(line.types))
                spans[rank].append(span)
                on_way.setdefault((rank, line.peer), deque()).append(span)
                ready.append(line.peer)
            else:
                sent = on_way.get((line.peer, rank))
                if not sent:  # not a wait of the rank: its SEND is just not simulated yet
                    break
                span = sent.popleft()
                for name in line.values:
                    arrived[rank][name, ONCE if name in step else action.microbatch] = span.end_us
                spans[rank].append(Span(line, span.start_us, span.end_us))
            at[rank] += 1
    if stuck := [rank for rank, lines in enumerate(lists) if at[rank] < len(lines)]:
        rank = stuck[0]
        raise ScheduleError(f"rank {rank} waits for ever at instruction {at[rank]} ({lists[rank][at[rank]]}).")
    return Timeline(tuple(tuple(sorted(found, key=lambda span: span.start_us)) for found in spans))


def in_flight(order: Iterable[Turn | Instruction], stage: int | None = None, until: str = "W") -> int:
    """The most micro-batches of a rank (or of one stage) whose forward has run and whose backward has not.

    until: of split backwards, the part that ends it. The zero-bubble paper counts activations to the end of W; "I"
    counts to the end of the gradient of inputs. In a pair they are there until both have ended.
    """
    now = most = 0
    for entry in order:
        if isinstance(entry, Instruction):
            if entry.op != "RUN":
                continue
            entry = entry.turn
        mine = [action.kind for action in entry.actions if stage in (None, action.stage)]
        now += mine.count("F")
        most = max(most, now)
        now -= sum(kind in ("B", until) for kind in mine)
    return most
