"""with_transfers: the turns of each rank -> its instructions, with sends, receives and the ends of values."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.ir.schedule import ONCE, Action, Costs, Flow, Instruction, Turn, Work, actions_of, turns_of
from autopar.passes.schedules.flows import check_flow
from autopar.passes.schedules.with_copies import with_copies

Lists = tuple[tuple[Instruction, ...], ...]
Key = tuple[str, int]  # a value and its micro-batch, or ONCE

_EVEN = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}  # the times where none are known
_END, _START = 0, 1  # events at the same time go in this order: what has ended is sent before anything starts


def with_transfers(orders: Sequence[Sequence[Turn]], flow: Flow, costs: Costs, prefetch: bool = False) -> Lists:
    """Derive from the flow of data what is sent when; two ranks, one micro-batch:

        0F0 0B0
        1F0 1B0
    becomes
        0F0, SEND 0F0 to rank 1: %x, RECV 1B0 from rank 1: %g, 0B0
        RECV 0F0 from rank 0: %x, 1F0, 1B0, SEND 1B0 to rank 0: %g

    The prologue (P) and the epilogue (E) of each rank are put in. An action without work is left out.

    The orders are replayed in simulated time. What a turn wrote and others read is sent at its end: a SEND is then
    appended to the list of its rank, and the RECV to that of the other. So the lists are parts of one sequence in
    which each instruction has what it needs, and nobody waits in a circle even if all sends and receives block: of
    all unfinished instructions the first in the sequence can proceed. This holds whether a turn has its place in
    the sequence at its start or at its end. prefetch: at its end, so that a RECV stands before the turn that its
    rank is busy with when the value is sent.
    """
    check_flow(flow)
    replay = _Replay(orders, flow, costs, prefetch)
    replay.run()
    owners = {(name, rank) for name, ranks in flow.owners.items() for rank in ranks}
    lists = [with_copies(lines, flow) for lines in replay.lists]
    return tuple(_with_frees(rank, lines, flow, replay.step, owners) for rank, lines in enumerate(lists))


class _Replay:
    """The state of all ranks at one time."""

    def __init__(self, orders: Sequence[Sequence[Turn]], flow: Flow, costs: Costs, prefetch: bool) -> None:
        self.flow, self.prefetch = flow, prefetch
        self.costs = (
            costs if costs.times_us else replace(costs, times_us={key: _EVEN.get(key[1], 0) for key in flow.works})
        )
        self.step = flow.step_values()
        self.orders = [_all_turns(rank, order, flow) for rank, order in enumerate(orders)]
        self.at = [0] * len(orders)  # the place of the first turn that has not started
        self.busy = [False] * len(orders)
        self.clock = [0.0] * len(orders)
        self.lists: list[list[Instruction]] = [[] for _ in orders]
        self.arrival: list[dict[Key, float]] = [{} for _ in orders]  # of the values of a rank
        self.readers: dict[Key, list[int]] = {}
        self.parts: Counter[str] = Counter()  # of sums, that are not added yet
        self.events: list[tuple[float, int, int]] = []
        for rank, order in enumerate(self.orders):
            for action in actions_of(order):
                self.parts.update(self.work(action).sums)
                for key in flow.needs_of(action):
                    ranks = self.readers.setdefault(key, [])
                    if not ranks or ranks[-1] != rank:
                        ranks.append(rank)

    def work(self, action: Action) -> Work:
        return self.flow.works[action.stage, action.kind]

    def run(self) -> None:
        self.send_homes()
        for rank in range(len(self.orders)):
            self.start(rank)
        while self.events:
            time_us, event, rank = heapq.heappop(self.events)
            turn = self.orders[rank][self.at[rank] - 1]
            if event == (_END if self.prefetch else _START):
                self.lists[rank].append(_run(turn))
            if event == _START:
                heapq.heappush(self.events, (time_us + self.costs.time_us(turn), _END, rank))
            else:
                self.clock[rank], self.busy[rank] = time_us, False
                self.end(rank, turn)
        self.check_finished()

    def start(self, rank: int) -> None:
        """Plan the next turn of a rank if all it reads is there or on its way."""
        if self.busy[rank] or self.at[rank] == len(self.orders[rank]):
            return
        turn, known, time_us = self.orders[rank][self.at[rank]], self.arrival[rank], self.clock[rank]
        for key in self.reads(turn):
            arrival = known.get(key)
            if arrival is None:
                return
            time_us = max(time_us, arrival)
        self.busy[rank] = True
        self.at[rank] += 1
        heapq.heappush(self.events, (time_us, _START, rank))

    def reads(self, turn: Turn) -> Iterator[Key]:
        return (key for action in turn.actions for key in self.flow.needs_of(action))

    def end(self, rank: int, turn: Turn) -> None:
        reached = [target for action in turn.actions for target in self.send_all(rank, action)]
        for woken in dict.fromkeys((rank, *reached)):
            self.start(woken)

    def send_all(self, rank: int, action: Action) -> list[int]:
        """Send what an action made to all who read it, and say who they are."""
        work = self.work(action)
        made = [*work.writes, *work.step_writes]
        for name in work.sums:
            self.parts[name] -= 1
            if not self.parts[name]:
                made.append(name)
        # values of the step go apart: they are needed later than those of the micro-batch, and may be large
        messages: dict[tuple[int, bool], list[str]] = {}
        for name in made:
            key = self.key(name, action)
            self.arrival[rank][key] = self.clock[rank]
            for target in self.readers.get(key, ()):
                if target != rank:
                    messages.setdefault((target, name in self.step), []).append(name)
        for (target, _), names in sorted(messages.items()):
            self.send(rank, target, action, names)
        return [target for target, _ in messages]

    def send_homes(self) -> None:
        """What lies on another rank from the start is sent first of all."""
        targets: dict[tuple[int, int], list[str]] = {}
        for name, owners in self.flow.owners.items():
            for rank in owners:
                if rank < len(self.orders):
                    self.arrival[rank][name, ONCE] = 0.0
            for target in self.readers.get((name, ONCE), ()):
                if target not in owners:
                    targets.setdefault((owners[0], target), []).append(name)
        for (rank, target), names in sorted(targets.items()):
            self.send(rank, target, Action(rank, "P"), names)

    def send(self, rank: int, target: int, action: Action, names: Sequence[str]) -> None:
        types = self.flow.types_of(action, names)
        arrival = self.clock[rank] + self.costs.transfer_us(types)
        for name in names:
            self.arrival[target][self.key(name, action)] = arrival
        self.lists[rank].append(Instruction("SEND", action, target, tuple(names), types))
        self.lists[target].append(Instruction("RECV", action, rank, tuple(names), types))

    def key(self, name: str, action: Action) -> Key:
        return name, ONCE if name in self.step else action.microbatch

    def check_finished(self) -> None:
        """Or name the ranks that wait for each other, in a circle."""
        stuck = {
            rank: order[at]
            for rank, (order, at) in enumerate(zip(self.orders, self.at, strict=True))
            if at < len(order)
        }
        if not stuck:
            return
        rank = min(stuck)
        path: list[int] = []
        says: list[str] = []
        while rank not in path:
            turn = stuck[rank]
            missing = next(key for key in self.reads(turn) if key not in self.arrival[rank])
            wanted = self.maker(missing)
            if wanted is None:
                of = "" if missing[1] == ONCE else f" of micro-batch {missing[1]}"
                raise ScheduleError(f"rank {rank} waits at {turn} for %{missing[0]}{of}, which no action makes.")
            path.append(rank)
            says.append(f"rank {rank} waits at {turn} for {wanted[1]} of rank {wanted[0]}")
            rank = wanted[0]
        raise ScheduleError(f"the schedule cannot be run: {', '.join(says[path.index(rank) :])}.")

    def maker(self, key: Key) -> tuple[int, Action] | None:
        """The first action to come that makes a value, or a part of it; and its rank."""
        for rank, (order, at) in enumerate(zip(self.orders, self.at, strict=True)):
            for action in actions_of(order[at:]):
                work = self.work(action)
                if key[0] in (*work.writes, *work.sums, *work.step_writes) and key[1] in (ONCE, action.microbatch):
                    return rank, action
        return None


def _all_turns(rank: int, order: Sequence[Turn], flow: Flow) -> list[Turn]:
    """With what is done once a step, and without actions that have no work."""
    between = next((at for at, turn in enumerate(order) if any(one.kind != "F" for one in turn.actions)), len(order))
    every = (Action(rank, "P"), *order[:between], Action(rank, "M"), *order[between:], Action(rank, "E"))
    works = flow.works
    return [one for turn in every for one in turns_of(a for a in turn.actions if (a.stage, a.kind) in works)]


def _run(turn: Turn) -> Instruction:
    first, *rest = (Instruction("RUN", action) for action in turn.actions)
    return replace(first, beside=rest[0]) if rest else first


def _with_frees(
    rank: int, lines: Sequence[Instruction], flow: Flow, step: frozenset[str], owners: set[tuple[str, int]]
) -> tuple[Instruction, ...]:
    """Free each value with the last instruction that names it; what is at their owner here stays."""
    seen: set[Key] = set()

    def freeing(line: Instruction) -> Instruction:
        names: Iterable[str] = line.values
        if line.op == "RUN":
            work = flow.works[line.action.stage, line.action.kind]
            names = (*work.reads, *work.writes, *work.sums, *work.step_reads, *work.step_writes)
        elif line.is_copy:
            names = (*names, *map(flow.copies(line).__getitem__, names))
        frees = []
        for name in names:
            key = (name, ONCE if name in step else line.action.microbatch)
            if key not in seen:
                seen.add(key)
                if (name, rank) not in owners:
                    frees.append(name)
        return replace(line, frees=tuple(frees)) if frees else line

    def both(line: Instruction) -> Instruction:  # a function that calls itself is a cycle, and would hold `seen`
        return freeing(line) if line.beside is None else freeing(replace(line, beside=freeing(line.beside)))

    return tuple(reversed([both(line) for line in reversed(lines)]))
