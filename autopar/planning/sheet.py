"""A graph as numbers: what each call asks of a machine, what is alive when. Those of other rows lie between two."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.mesh import CONTEXT_AXES, Mesh, axes_of_group
from autopar.ir.ops import is_collective
from autopar.ir.program import Program, is_getitem, is_view, record, root_of
from autopar.machines import Machine
from autopar.passes.node_costs import RING, TURNS, Load, load_us, loads_of
from autopar.passes.streams import WAIT, Launch, Ran, launches_of, run_launches
from autopar.planning.depth import Rest

LEFT = {"F": "saved", "I": "saved", "P": "step"}  # of a graph's outputs, what later actions hold
SUMS = "E"  # the action that adds up gradients over ranks


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a graph. stays: True if it is none of the layer that is left out. side: -1 before the equal layers, 0
    in one, 1 behind them. own: bytes of what it makes and the graph does not leave. dying: the places of calls whose
    values nothing reads after this one."""

    load: Load | None
    launch: Launch | None
    stays: bool
    side: int
    own: float
    dying: tuple[int, ...]

    def between(self, other: Call, share: float) -> Call | None:
        """As of a `Sheet`."""
        if self == other:
            return self
        if (self.launch, self.stays, self.side, self.dying) != (other.launch, other.stays, other.side, other.dying):
            return None
        if self.load is None or other.load is None:
            load = None
            is_alike = self.load is other.load
        else:
            load = self.load.between(other.load, share)
            is_alike = load is not None
        own = self.own + (other.own - self.own) * share
        return Call(load, self.launch, self.stays, self.side, own, self.dying) if is_alike else None


@dataclass(frozen=True, slots=True)
class Sheet:
    """The calls of a graph. left: bytes of what it leaves for later actions (`LEFT`), of gradients of weights (W) of
    what earlier ones left to it: of all layers, without the one that is left out, and of what comes before the layers.
    reads: the parameters that it reads."""

    mesh: Mesh
    calls: tuple[Call, ...]
    left: tuple[float, float, float]
    reads: frozenset[str]

    @classmethod
    def of(cls, kind: str, program: Program, rest: Rest) -> Sheet:
        """kind: of the action that runs the graph. rest: all but the layer that may be left out."""
        leaving = [node for node, out in program.leaving if out.kind == LEFT.get(kind) and node is not None]
        if kind == "W":
            leaving = [node for node, entry in program.entries if entry.kind == "saved"]
        kinds = leaving, list(filter(rest.counts, leaving)), list(filter(rest.is_entry, leaving))
        whole, less, entry = (_bytes(program, nodes, kind == "W") for nodes in kinds)
        reads = frozenset(entry.name for _, entry in program.parameters())
        return cls(program.mesh, tuple(_calls(kind, program, rest)), (whole, less, entry), reads)

    def between(self, other: Sheet, share: float) -> Sheet | None:
        """The sheet at a share of the way to another one, 0 to 1: every number on a straight line. None where they are
        not call by call alike."""
        if self is other:
            return self
        if (self.mesh, self.reads, len(self.calls)) != (other.mesh, other.reads, len(other.calls)):
            return None
        calls: list[Call] = []
        for low, high in zip(self.calls, other.calls, strict=True):
            call = low.between(high, share)
            if call is None:
                return None
            calls.append(call)
        whole, less, entry = (low + (high - low) * share for low, high in zip(self.left, other.left, strict=True))
        return Sheet(self.mesh, tuple(calls), (whole, less, entry), self.reads)

    def times(self, machine: Machine, is_still: bool = False) -> list[float]:
        """us of each call. is_still: as if what cp and ulysses move took no time."""
        loads = (_still(call.load) if is_still else call.load for call in self.calls)
        return [load_us(load, self.mesh, machine) for load in loads]

    def ran(self, times: list[float], machine: Machine, is_less: bool) -> Ran:
        """The graph on a machine. is_less: without the calls of the layer that is left out."""
        launches = (None if is_less and not call.stays else call.launch for call in self.calls)
        return run_launches(launches, times, machine)

    def entry_us(self, times: list[float]) -> float:
        """us of the calls that come before the layers."""
        return sum(
            time for time, call in zip(times, self.calls, strict=True) if call.side < 0 and call.launch is not None
        )

    def peak(self, is_less: bool, sides: Collection[int] = (-1, 0, 1)) -> float:
        """The most bytes of a graph's own values that are alive at once, beside those that it leaves. sides: of the
        calls at which they are counted."""
        calls = self.calls
        own = [0.0 if is_less and not call.stays else call.own for call in calls]
        alive = most = 0.0
        for made, call in zip(own, calls, strict=True):
            alive += made
            if alive > most and call.side in sides:
                most = alive
            for place in call.dying:
                alive -= own[place]
        return most


def described(program: Program) -> Iterator[Hashable]:
    """All that a sheet of a graph follows from; of equal graphs the same."""
    yield program.mesh, program.inputs, program.outputs
    for node in program.graph.nodes:
        known = record(node)
        yield node.name, node.target, str(node.args), str(node.kwargs), known, known.flops


def _bytes(program: Program, nodes: list[fx.Node], given: bool) -> int:
    """Of what some values lie in. given: also of what was there before."""
    roots = {root_of(node) for node in nodes}
    return sum(local_bytes(root, program.mesh) for root in roots if given or root.op == "call_function")


def _calls(kind: str, program: Program, rest: Rest) -> Iterator[Call]:
    """Sums of gradients over cp and ulysses take no time here: they are over all data axes at once (`data_time.py`)."""
    loads, launches = loads_of(program), launches_of(program)
    place = {node: i for i, node in enumerate(loads)}
    leaving = {root_of(node) for node in program.results if node is not None}
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        last.update(dict.fromkeys(map(root_of, node.all_input_nodes), node))
    dying: dict[fx.Node, list[int]] = {}
    for node, user in last.items():
        if node in place:
            dying.setdefault(user, []).append(place[node])
    for (node, load), launch in zip(loads.items(), launches, strict=True):
        is_own = not is_getitem(node) and not is_view(node) and node not in leaving
        own = local_bytes(node, program.mesh) if is_own else 0
        side = -1 if rest.is_entry(node) else int(not rest.is_equal(node))
        launch = None if kind == SUMS and _is_over_context(node) else launch
        yield Call(load, launch, rest.counts(node), side, own, tuple(dying.get(node, ())))


def _still(load: Load | None) -> Load | None:
    if load is None or not _splits_sequences(load.axis):
        return load
    return replace(load, link="") if load.link == RING else load if load.link == TURNS else None


def _is_over_context(node: fx.Node) -> bool:
    moved = node.all_input_nodes[0] if node.target is WAIT else node
    return is_collective(moved.target) and _splits_sequences(str(moved.args[1]))


def _splits_sequences(group: str) -> bool:
    return not set(CONTEXT_AXES).isdisjoint(axes_of_group(group))
