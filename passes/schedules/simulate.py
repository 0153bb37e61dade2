"""simulate: instructions and the times of their actions -> when each rank does what."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from autopar.errors import ScheduleError
from autopar.ir.schedule import IN, ONCE, OUT, Action, Flow, Instruction, Span, Timeline, Times, Turn, copies_ended


def simulate(lists: Sequence[Sequence[Instruction]], flow: Flow, costs: Times) -> Timeline:
    """Replay checked lists (`check_schedule`) with asynchronous transfers.

    A SEND starts when its action has ended and arrives `transfer_us` later, beside all other transfers; neither rank
    stands still for it. A turn starts when the one before it has ended and all it reads has arrived.

    An OUT or an IN is a copy on the link of its rank, one at a time each way, with those that stand in the graphs of
    turns: these begin when the link is free. Behind the turn that follows an OUT the rank waits for its end.
    """
    step = flow.step_values()
    spans: list[list[Span]] = [[] for _ in lists]
    clock = [0.0] * len(lists)
    ended: list[dict[Action, float]] = [{} for _ in lists]
    arrived: list[dict[tuple[str, int], float]] = [{} for _ in lists]
    on_way: dict[tuple[int, int], deque[Span]] = {}
    links = [_Links(lines, flow, costs) for lines in lists]
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
                start = links[rank].arrived(turn, start)
                clock[rank] = start + costs.time_us(turn) + links[rank].taken(turn, start)
                ended[rank].update(dict.fromkeys(turn.actions, clock[rank]))
                spans[rank].append(Span(line, start, clock[rank]))
                clock[rank] = links[rank].left(at[rank], clock[rank])
            elif line.is_copy:
                clock[rank] = links[rank].left(at[rank], clock[rank])
                spans[rank].append(links[rank].copy(at[rank], line, clock[rank]))
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
    copied = tuple((one.waited[OUT], one.waited[IN]) for one in links)
    return Timeline(tuple(tuple(sorted(found, key=lambda span: span.start_us)) for found in spans), copied)


class _Links:
    """The links of a rank to the host's memory and back. free: us when each is; waited: us that the rank waited."""

    def __init__(self, lines: Sequence[Instruction], flow: Flow, costs: Times) -> None:
        self.flow, self.costs = flow, costs
        self.is_used = any(line.is_copy for line in lines)
        self.free, self.waited = {OUT: 0.0, IN: 0.0}, {OUT: 0.0, IN: 0.0}
        self.there: dict[tuple[str, int], float] = {}  # us when a copy has ended, by what it made
        self.ends: dict[int, float] = {}  # of each OUT
        self.behind = defaultdict[int, list[int]](list)
        for out, place in copies_ended(lines, flow).items() if self.is_used else ():
            self.behind[place].append(out)

    def copy(self, place: int, line: Instruction, now: float) -> Span:
        """Start a copy: behind its rank, the one before it on the link, and its own copy out."""
        copies, number = self.flow.copies(line), line.action.microbatch
        source = max(self.there.get((copies[name], number), 0.0) for name in line.values)
        start = max(now, self.free[line.op], source)
        end = self.free[line.op] = start + self.costs.copy_us(line.types)
        self.there.update(dict.fromkeys(((name, number) for name in line.values), end))
        if line.op == OUT:
            self.ends[place] = end
        return Span(line, start, end)

    def arrived(self, turn: Turn, start: float) -> float:
        """When a turn that could start has what comes back for it."""
        if not self.is_used:
            return start
        reads = (key for one in turn.actions for key in self.flow.reads_of(one))
        later = max(start, *(self.there.get(key, 0.0) for key in reads), 0.0)
        self.waited[IN] += later - start
        return later

    def taken(self, turn: Turn, start: float) -> float:
        """How much later a turn ends for the copies in its graphs, which wait until a link is free."""
        late = 0.0
        for way, us in zip((OUT, IN), self.costs.link_us(turn) if self.is_used else (), strict=False):
            if us > 0:
                behind = max(0.0, self.free[way] - start)
                self.free[way] = start + behind + us
                self.waited[way] += max(0.0, behind - late)
                late = max(late, behind)
        return late

    def left(self, place: int, now: float) -> float:
        """When the copies have ended that must have, behind an instruction or before it."""
        later = max((self.ends[out] for out in self.behind[place]), default=now) if self.is_used else now
        self.waited[OUT] += max(0.0, later - now)
        return max(now, later)


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


def turns_between(order: Sequence[Turn], stage: int) -> int:
    """The most turns of a rank between the forward of a micro-batch on a stage and what goes back of it first."""
    begun, most = dict[int, int](), 0
    for number, turn in enumerate(order):
        for action in turn.actions:
            if action.stage == stage and action.kind == "F":
                begun[action.microbatch] = number
            elif action.stage == stage and action.microbatch in begun:
                most = max(most, number - begun.pop(action.microbatch) - 1)
    return most
