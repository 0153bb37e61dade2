"""A graph as numbers: what each call asks of a machine, what is alive when. Those of other rows lie between two."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import fx

from autopar.ir.mesh import CONTEXT_AXES, GRADIENT_AXES, Mesh, axes_of_group
from autopar.ir.ops.measure import PIECE_BYTES, local_bytes, widened_bytes
from autopar.ir.ops.ops import is_collective
from autopar.ir.ops.storage import is_view, root_of
from autopar.ir.program import Program, is_getitem, record
from autopar.machines import Machine
from autopar.passes.costs.node_costs import RING, TURNS, Load, load_us, loads_of
from autopar.passes.costs.streams import WAIT, StreamCall, StreamTimes, launches_of, run_launches
from autopar.passes.overlap.bucket import sums_of_gradients
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.events import NO_EVENTS, Events, Named
from autopar.planning.shallow.sides import BEFORE, BEHIND, BODIES, INSIDE, JOINED, SUM, side_of, sides_of, terms_of
from autopar.runtime.executor.executor import written_over

SAVED = "saved"
LEFT = {"F": SAVED, "I": SAVED, "P": "step", "M": "step"}  # of a graph's outputs, what later actions hold
SUMS = "E"  # the action that adds up gradients over ranks
Kept = tuple[float, float, float]
NONE: Kept = (0.0, 0.0, 0.0)


class SheetCall(NamedTuple):  # a search of plans makes a hundred thousand
    """A call of a graph. stays: True if it is none of the layer that is left out. side: as of `sides_of`. own: bytes of
    what it makes and the graph does not leave. dying: the places of calls whose values nothing reads after this one.
    kept: how many bytes more are kept between actions, or fewer after it: of all, without the layer that is left out,
    of what lies behind the layers. widened: bytes of its logits in float32. term: TERM of what a joined sum
    adds, SUM of the sum. layer: which of the program's equal layers it lies in, in their order, -1 in none. events:
    what it reads of parameters, and makes of their gradients. other: in which further list of equal layers it lies, and
    in which of its three."""

    load: Load | None
    launch: StreamCall | None
    stays: bool
    side: int
    own: float
    dying: tuple[int, ...]
    kept: Kept
    widened: float
    term: int
    layer: int = -1
    events: Events = NO_EVENTS
    other: tuple[int, int] = (-1, -1)

    def between(self, other: SheetCall, share: float) -> SheetCall | None:
        """The call at a share of the way to another, as of a `Sheet`."""
        if self == other:
            return self
        if (self.launch, self.stays, self.side, self.dying) != (other.launch, other.stays, other.side, other.dying):
            return None
        if self.events != other.events:
            return None
        if self.load is None or other.load is None:
            load = None
            is_alike = self.load is other.load
        else:
            load = self.load.between(other.load, share)
            is_alike = load is not None
        own = self.own + (other.own - self.own) * share
        kept = _on_line(self.kept, other.kept, share)
        widened = self.widened + (other.widened - self.widened) * share
        return self._replace(load=load, own=own, kept=kept, widened=widened) if is_alike else None


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes at calls behind the equal layers, in them, and before them: there without what a backward pass
    adds up of both ends, and with it (`joined`). tied: what of that is alive in the layers. Before the layers and in
    them nothing of what lies behind counts as let go of."""

    behind: float
    inner: float
    first: float
    joined: float
    tied: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """The calls of a graph. left: bytes of what it leaves for later actions (`LEFT`), of gradients of weights (W) of
    what earlier ones left to it: of all layers, without the one that is left out, and of what comes before the layers.
    reads: the parameters that it reads. ahead: of what is kept between actions, what it has yet to make (F)."""

    mesh: Mesh
    calls: tuple[SheetCall, ...]
    left: Kept
    reads: frozenset[str]
    ahead: Kept

    @classmethod
    def of(
        cls, kind: str, program: Program, rest: Rest, named: Named, waited: Collection[str] = (),
        given: Collection[str] = (),
    ) -> Sheet:  # fmt: skip
        """kind: of the action that runs the graph. rest: all but the layer that may be left out. named: parameters and
        gradients. waited: the names of what is kept for a later action too; given: of what the graph may write over."""
        leaving = [node for node, out in program.leaving if out.kind == LEFT.get(kind) and node is not None]
        if kind == "W":
            leaving = [node for node, entry in program.entries if entry.kind == SAVED]
        kinds = leaving, list(filter(rest.counts, leaving)), list(filter(rest.is_entry, leaving))
        whole, less, entry = (_bytes(program, nodes, kind == "W", rest) for nodes in kinds)
        reads = frozenset(entry.name for _, entry in program.parameters())
        calls = tuple(_calls(kind, program, rest, named, waited, given))
        ahead = sum_of(call.kept for call in calls) if kind == "F" else NONE
        return cls(program.mesh, calls, (whole, less, entry), reads, ahead)

    def between(self, other: Sheet, share: float) -> Sheet | None:
        """The sheet at a share of the way to another one, 0 to 1: every number on a straight line. None where they are
        not call by call alike."""
        if self is other:
            return self
        if (self.mesh, self.reads, len(self.calls)) != (other.mesh, other.reads, len(other.calls)):
            return None
        calls: list[SheetCall] = []
        for low, high in zip(self.calls, other.calls, strict=True):
            call = low.between(high, share)
            if call is None:
                return None
            calls.append(call)
        left, ahead = (_on_line(*pair, share) for pair in ((self.left, other.left), (self.ahead, other.ahead)))
        return Sheet(self.mesh, tuple(calls), left, self.reads, ahead)

    def times(self, machine: Machine, is_still: bool = False, adds: bool = True) -> list[float]:
        """us of each call. is_still: as if what cp and ulysses move took no time. adds: False if calls add to nothing
        that earlier micro-batches made."""
        loads = (still(call.load) if is_still else call.load for call in self.calls)
        if not adds:
            loads = (load and load._replace(total=0.0) for load in loads)
        return [load_us(load, self.mesh, machine) for load in loads]

    def ran(self, times: list[float], machine: Machine, is_less: bool) -> StreamTimes:
        """The graph on a machine. is_less: without the calls of the layer that is left out."""
        launches = (None if is_less and not call.stays else call.launch for call in self.calls)
        return run_launches(launches, times, machine)

    def entry_us(self, times: list[float]) -> float:
        """us of the calls that come before the layers."""
        return sum(
            time
            for time, call in zip(times, self.calls, strict=True)
            if call.side == BEFORE and call.launch is not None
        )

    @property
    def entry_calls(self) -> int:
        """How many of these there are; what waits for a collective is none."""
        return sum(call.side == BEFORE and call.launch is not None and call.launch.awaits < 0 for call in self.calls)

    def adds_us(self, times: list[float], machine: Machine, is_less: bool, is_entry: bool = False) -> float:
        """us by which calls take longer because they add to what earlier micro-batches made. is_entry: of those calls
        alone that come before the layers."""
        return sum(
            us - load_us(call.load._replace(total=0.0), self.mesh, machine)
            for call, us in zip(self.calls, times, strict=True)
            if call.load and call.load.total
            if (call.side == BEFORE if is_entry else call.stays or not is_less)
        )

    def sums_us(self, times: list[float]) -> float:
        """us of joined sums."""
        return sum(time for time, call in zip(times, self.calls, strict=True) if call.term == SUM)

    def most(self, is_less: bool) -> float:
        """The most bytes of its own values that are alive at once, beside what it leaves for later actions."""
        own = [0.0 if is_less and not call.stays else call.own for call in self.calls]
        alive = most = 0.0
        for made, call in zip(own, self.calls, strict=True):
            alive += made
            most = max(most, alive)
            alive -= sum(own[place] for place in call.dying)
        return most

    def peaks(self, is_less: bool) -> Peaks:
        """The most bytes that are alive at once beside what is kept of a micro-batch between actions: of a graph's own
        values, less what it has yet to make of that, or has let go of."""
        own = [0.0 if is_less and not call.stays else call.own for call in self.calls]
        most, tied = dict.fromkeys((BEFORE, INSIDE, BEHIND, JOINED), -math.inf), 0.0
        alive, terms, front, kept = 0.0, 0.0, -_front(self.ahead, is_less), -self.ahead[is_less]
        least = front
        for made, call in zip(own, self.calls, strict=True):
            more, all_ = _front(call.kept, is_less), call.kept[is_less]
            front, kept = front + max(more, 0.0), kept + max(all_, 0.0)
            alive += made
            terms += made * bool(call.term)
            if call.side == BEHIND:
                most[BEHIND] = max(most[BEHIND], alive + kept + min(call.widened, PIECE_BYTES))
            elif call.side == INSIDE:
                most[INSIDE] = max(most[INSIDE], alive + front - terms)
                tied = max(tied, terms)
            else:
                most[JOINED] = max(most[JOINED], alive + front)
                if call.side == BEFORE:
                    most[BEFORE] = max(most[BEFORE], alive + front - terms)
            front, kept = front + min(more, 0.0), kept + min(all_, 0.0)
            for place in call.dying:
                alive -= own[place]
                terms -= own[place] * bool(self.calls[place].term)
        behind, inner, first, joined = (max(most[side], min(least, front)) for side in (BEHIND, INSIDE, BEFORE, JOINED))
        return Peaks(behind, inner, first, joined, tied)


def _front(kept: Kept, is_less: bool) -> float:
    """Without what lies behind the layers."""
    return kept[is_less] - kept[2]


def sum_of(all_: Iterable[Kept]) -> Kept:
    whole, less, behind = map(sum, zip(*all_, strict=True))
    return whole, less, behind


def _on_line(low: Kept, high: Kept, share: float) -> Kept:
    if low == high:
        return low
    whole, less, behind = (one + (other - one) * share for one, other in zip(low, high, strict=True))
    return whole, less, behind


def described(program: Program) -> Iterator[Hashable]:
    """All that a sheet of a graph follows from; of equal graphs the same, in whatever order their results leave."""
    yield program.mesh, program.inputs, frozenset((str(node), out) for node, out in program.leaving)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        known = record(node)
        yield node.name, node.target, str(node.args), str(node.kwargs), known, known.flops


def _bytes(program: Program, nodes: list[fx.Node], given: bool, rest: Rest) -> int:
    """Count the bytes that some values lie in. given: also of what was there before."""
    roots = {root_of(node): rest.times(node) for node in nodes}
    taken = ((root, times) for root, times in roots.items() if given or root.op == "call_function")
    return sum(times * local_bytes(root, program.mesh) for root, times in taken)


def _calls(
    kind: str, program: Program, rest: Rest, named: Named, waited: Collection[str], given: Collection[str]
) -> Iterator[SheetCall]:  # fmt: skip
    """Sums of gradients take no time here: they are taken over all data axes at once (`data_streams.py`)."""
    loads, launches = loads_of(program, adds=True), launches_of(program)
    place = {node: i for i, node in enumerate(loads)}
    leaving = {root_of(node) for node in program.results if node is not None}
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        last.update(dict.fromkeys(map(root_of, node.all_input_nodes), node))
    dying: dict[fx.Node, list[int]] = {}
    for node, user in last.items():
        if node in place:
            dying.setdefault(user, []).append(place[node])
    mine = [node for node, entry in program.entries if entry.kind == SAVED and entry.name in given]
    written = written_over(program.graph, mine) if mine else {}  # of other values nobody asks
    over = {root_of(operand): node for node, operand in written.items()}
    kept = _kept(kind, program, rest, waited, last, over)
    sides = sides_of(kind, program, rest)
    terms, sums = dict(terms_of(sides)), _sums(kind, program)
    layers = {path: i for i, path in enumerate(rest.layers)}
    events = named.events(program) if kind in BODIES else {}
    for (node, load), launch in zip(loads.items(), launches, strict=True):
        is_own = not is_getitem(node) and not is_view(node) and node not in leaving
        own = local_bytes(node, program.mesh) if is_own else 0
        launch, layer = None if node in sums else launch, rest.layer(node)
        yield SheetCall(
            load, launch, rest.counts(node), sides[node], own, tuple(dying.get(node, ())),
            kept.get(node, NONE), widened_bytes(node, program.mesh), terms.get(node, 0), layers.get(layer, -1),
            events.get(node, NO_EVENTS), rest.other(node),
        )  # fmt: skip


def _kept(
    kind: str, program: Program, rest: Rest, waited: Collection[str], last: Mapping[fx.Node, fx.Node],
    over: Mapping[fx.Node, fx.Node],
) -> dict[fx.Node, Kept]:  # fmt: skip
    """`SheetCall.kept`, of calls where that is something. last: the last call that reads each value. over: the calls
    that write over values: these are gone with the call before."""
    before = {node: earlier for earlier, node in pairwise(program.calls())}
    changes = [
        (before.get(last[node], last[node]) if over.get(node) is last[node] else last[node], node, -1)
        for node, entry in program.entries
        if entry.kind == SAVED and entry.name not in waited
    ]
    if LEFT.get(kind) == SAVED:
        made = {root_of(node) for node, out in program.leaving if out.kind == SAVED and node is not None}
        changes += [(node, node, 1) for node in program.calls() if node in made]
    kept: dict[fx.Node, Kept] = {}
    for at, node, sign in changes:
        bytes_ = float(sign * local_bytes(node, program.mesh))
        more = bytes_, bytes_ * rest.counts(node), bytes_ * (side_of(node, rest) == BEHIND)
        kept[at] = sum_of((kept.get(at, NONE), more))
    return kept


def still(load: Load | None) -> Load | None:
    """What a call asks for if what cp and ulysses move took no time; None if that is nothing."""
    if load is None or set(CONTEXT_AXES).isdisjoint(axes_of_group(load.axis)):
        return load
    return load._replace(link="") if load.link == RING else load if load.link == TURNS else None


def _sums(kind: str, program: Program) -> set[fx.Node]:
    """The calls that add up gradients over ranks, and of what runs once a step all that moves over data axes."""
    sums, _ = sums_of_gradients(program)
    return {*sums, *(node for node in program.calls() if kind == SUMS and _is_over_data(node))}


def _is_over_data(node: fx.Node) -> bool:
    if node.target is WAIT or not is_collective(node.target):
        return False
    return any(axis in GRADIENT_AXES for axis in axes_of_group(str(node.args[1])))
