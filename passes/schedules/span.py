"""Walk: the orders of a schedule -> one order of all actions, in which how long they take is a matter of one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Flow, Times, Turn, actions_of, turns_of

Kind = tuple[int, str]  # a stage, and what is run of it
Message = tuple[str, ...]  # the names of the values in it; none on one rank
Step = tuple[int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """All turns of a schedule of values of the micro-batch alone, without slices, each behind those that it waits for,
    however long they take. kinds: of turns, with two entries for a pair. steps: of each turn its rank, the number of
    its kind, and the numbers of the turns that it waits for, each with the number of the message from there. firsts:
    the first turn of each rank."""

    kinds: Sequence[tuple[Kind, ...]]
    messages: Sequence[Message]
    steps: Sequence[Step]
    firsts: Sequence[int]

    @classmethod
    def of(cls, orders: Sequence[Sequence[Turn]], flow: Flow) -> Walk:
        """Raises ScheduleError for ranks that wait in a circle."""
        assert flow.slices == 1 and not flow.step_values(), "slices, and values of the step, are left to simulate"
        kinds = list(dict.fromkeys((one.stage, one.kind) for order in orders for one in actions_of(order)))
        waits, messages = _waits(flow, kinds)
        number_of: dict[tuple[Kind, ...], int] = {}
        place: dict[Kind, dict[int, int]] = {kind: {} for kind in kinds}  # of each micro-batch
        waiting: dict[Kind, dict[int, list[int]]] = {kind: defaultdict(list) for kind in kinds}  # ranks
        steps, at, firsts = list[Step](), [0] * len(orders), dict[int, int]()
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            while at[rank] < len(orders[rank]):
                turn = [((one.stage, one.kind), one.microbatch) for one in orders[rank][at[rank]].actions]
                asked = [(source, message, k) for kind, k in turn for source, message in waits[kind]]
                missing = next(((source, k) for source, _, k in asked if k not in place[source]), None)
                if missing is not None:
                    waiting[missing[0]][missing[1]].append(rank)
                    break
                firsts.setdefault(rank, len(steps))
                needs = tuple((place[source][k], message) for source, message, k in asked)
                for kind, k in turn:
                    place[kind][k] = len(steps)
                    ready += waiting[kind].pop(k, ())
                kinds_of = tuple(kind for kind, _ in turn)
                steps.append((rank, number_of.setdefault(kinds_of, len(number_of)), needs))
                at[rank] += 1
        if stuck := [rank for rank, order in enumerate(orders) if at[rank] < len(order)]:
            raise ScheduleError(f"rank {stuck[0]} waits for ever at {orders[stuck[0]][at[stuck[0]]]}.")
        return cls(list(number_of), messages, steps, list(firsts.values()))

    def span_us(self, types: Mapping[str, TensorType], costs: Times) -> float:
        """What `simulate(with_transfers(orders, flow, costs), flow, costs).span_us` is, in a small part of the time:
        transfers go beside everything, so a turn starts when the one before it on its rank has ended and what it
        reads has arrived. types: of the values that are sent."""
        turns = (turns_of(Action(*kind, 0) for kind in kinds) for kinds in self.kinds)
        took = [costs.time_us(turn) for (turn,) in turns]
        sent = [costs.transfer_us(tuple(types[name] for name in names)) if names else 0.0 for names in self.messages]
        clock, ends = defaultdict[int, float](float), list[float]()
        for rank, kind, needs in self.steps:
            now = clock[rank]
            for place, message in needs:
                arrived = ends[place] + sent[message]
                if arrived > now:
                    now = arrived
            clock[rank] = now = now + took[kind]
            ends.append(now)
        starts = {self.steps[i][0]: ends[i] - took[self.steps[i][1]] for i in self.firsts}
        return max((clock[rank] - start for rank, start in starts.items()), default=0.0)


def _waits(flow: Flow, kinds: Collection[Kind]) -> tuple[Mapping[Kind, list[tuple[Kind, int]]], list[Message]]:
    """Find what each kind of action waits for on the same micro-batch, each with the number of the message from
    there: all that its rank reads of it."""
    makers = {name: kind for kind in kinds for name in flow.works[kind].writes}
    read: dict[tuple[Kind, int], dict[str, None]] = defaultdict(dict)  # by maker and rank
    for kind in kinds:
        for name in flow.works[kind].reads:
            read[makers[name], flow.ranks[kind[0]]][name] = None
    numbers: dict[Message, int] = {}

    def message(source: Kind, rank: int) -> int:
        own = flow.ranks[source[0]] == rank
        names = () if own else tuple(name for name in flow.works[source].writes if name in read[source, rank])
        return numbers.setdefault(names, len(numbers))

    found: dict[Kind, list[tuple[Kind, int]]] = {}
    for kind in kinds:
        rank, sources = flow.ranks[kind[0]], dict.fromkeys(makers[name] for name in flow.works[kind].reads)
        found[kind] = [(source, message(source, rank)) for source in sources]
    return found, list(numbers)
