"""span_us: the orders of a schedule and the times of their actions -> how long it takes, without its instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, Flow, Times

Kind = tuple[int, str]  # a stage, and what is run of it


def span_us(orders: Sequence[Sequence[Action]], flow: Flow, costs: Times) -> float:
    """What `simulate(with_transfers(orders, flow, costs), flow, costs).span_us` is for a flow of values of the
    micro-batch alone, without slices, in a twentieth of the time: transfers go beside everything, so an action starts
    when the one before it on its rank has ended and what it reads has arrived. Raises ScheduleError for ranks that
    wait in a circle."""
    assert flow.slices == 1 and not flow.step_values(), "slices, and values of the step, are left to simulate"
    kinds = {(action.stage, action.kind) for order in orders for action in order}
    waits = _waits(flow, kinds, costs)
    took = {kind: costs.time_us(Action(*kind, 0)) for kind in kinds}
    ends: dict[Kind, dict[int, float]] = {kind: {} for kind in kinds}
    waiting: dict[Kind, dict[int, list[int]]] = {kind: defaultdict(list) for kind in kinds}  # ranks
    at, clock, first = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        while at[rank] < len(orders[rank]):
            action = orders[rank][at[rank]]
            kind, microbatch, start = (action.stage, action.kind), action.microbatch, now
            missing = None
            for source, transfer_us in waits[kind]:
                end = ends[source].get(microbatch)
                if end is None:
                    missing = source
                    break
                start = max(start, end + transfer_us)
            if missing is not None:
                waiting[missing][microbatch].append(rank)
                break
            if at[rank] == 0:
                first[rank] = start
            now = ends[kind][microbatch] = start + took[kind]
            ready += waiting[kind].pop(microbatch, ())
            at[rank] += 1
        clock[rank] = now
    if stuck := [rank for rank, order in enumerate(orders) if at[rank] < len(order)]:
        raise ScheduleError(f"rank {stuck[0]} waits for ever at {orders[stuck[0]][at[stuck[0]]]}.")
    return max((end - start for end, start in zip(clock, first, strict=True)), default=0.0)


def _waits(flow: Flow, kinds: Collection[Kind], costs: Times) -> Mapping[Kind, list[tuple[Kind, float]]]:
    """Of each kind of action those that it waits for on the same micro-batch, with the us of the message from there:
    of all that its rank reads of it, none on one rank."""
    makers = {name: kind for kind in kinds for name in flow.works[kind].writes}
    read: dict[tuple[Kind, int], dict[str, None]] = defaultdict(dict)  # by maker and rank
    for kind in kinds:
        for name in flow.works[kind].reads:
            read[makers[name], flow.ranks[kind[0]]][name] = None

    def message_us(source: Kind, rank: int) -> float:
        types = tuple(flow.types[name] for name in flow.works[source].writes if name in read[source, rank])
        return 0.0 if flow.ranks[source[0]] == rank else costs.transfer_us(types)

    found: dict[Kind, list[tuple[Kind, float]]] = {}
    for kind in kinds:
        rank, sources = flow.ranks[kind[0]], dict.fromkeys(makers[name] for name in flow.works[kind].reads)
        found[kind] = [(source, message_us(source, rank)) for source in sources]
    return found
