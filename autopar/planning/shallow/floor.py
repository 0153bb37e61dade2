"""What a micro-batch takes at least, of fewer rows and on more ranks of cp than its program was made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.mesh import Mesh, is_in_time
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.storage import root_of
from autopar.ir.program import CAST, Program, operand_nodes, record
from autopar.machines import Machine
from autopar.passes.costs.moved import LOOKUPS
from autopar.passes.costs.node_costs import RING, TURNS, Load, least_flops, load_us, loads_of
from autopar.passes.costs.streams import launches_of
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.sheet import still
from autopar.planning.shallow.sides import SUM, sides_of, terms_of
from autopar.planning.shallow.stage_graphs import Micro

Line = Callable[[float, float], float]
Pair = tuple[float, float]  # of all calls, and of those that are none of the layer that is left out
GRADIENTS = frozenset(("gradient", "part"))  # kinds of outputs: of weights, and of the loss


@dataclass(frozen=True, slots=True)
class Ask:
    """What equal calls ask for, each. fixed: bytes that one reads or writes of parameters and their gradients, however
    few rows there are. count: of the calls; stay: of those that are none of the layer that is left out."""

    load: Load
    fixed: float
    count: int
    stay: int

    def at(self, share: float) -> Ask:
        """What a share of the rows asks for."""
        load = self.load
        moved = self.fixed + (load.moved - self.fixed) * share
        results = tuple([result * share for result in load.results])
        sent = tuple([(times, size * share) for times, size in load.sent])
        less = load._replace(
            flops=load.flops * share, squares=load.squares * share, moved=moved, results=results, sent=sent
        )  # fmt: skip
        return replace(self, load=less)


@dataclass(frozen=True, slots=True)
class Floor:
    """The calls of the forward pass and of the backward pass, before anything is done to hide collectives."""

    mesh: Mesh
    forward: tuple[Ask, ...]
    backward: tuple[Ask, ...]

    @classmethod
    def of(cls, micro: Micro, rest: Rest) -> Floor:
        """rest: all but the layer that may be left out."""
        casts = frozenset(_casts(micro.graphs["P"])) if "P" in micro.graphs else frozenset[str]()
        asks = {kind: tuple(_asks(kind, micro.fused(micro.graphs[kind]), rest, casts)) for kind in "FB"}
        return cls(micro.program.mesh, asks["F"], asks["B"])

    def at(self, share: float, machine: Machine, is_still: bool = False) -> Low:
        """The floor of a share of the rows. machine: one whose larger calls are faster. is_still: as if what cp
        and ulysses move took no time."""
        ranks = Mesh(tuple(pair for pair in self.mesh.axes if is_in_time(pair[0])))
        both = ([ask.at(share) for ask in asks] for asks in (self.forward, self.backward))
        return Low(ranks, machine, *(_Pass.of(asks, machine, is_still) for asks in both))


@dataclass(frozen=True, slots=True)
class Low:
    """The calls of a floor with so many rows, on a machine. mesh: the axes that no rank lies on."""

    mesh: Mesh
    machine: Machine
    forward: _Pass
    backward: _Pass

    def us(self, ranks: Mesh, line: Line) -> tuple[float, float, float]:
        """us of the forward and of the backward pass at least, and of the device in both, however late its calls come.
        ranks: the mesh in which these lie. line: from what all calls take, and those that are none of the layer that is
        left out, to what the whole model takes.

        Whatever hides them, collectives take a part of the device from the calls beside them
        (`passes/costs/streams.py`).
        """
        mesh, machine = Mesh((*self.mesh.axes, *ranks.axes)), self.machine
        (forward, busy), (backward, more) = (each.us(mesh, machine, line) for each in (self.forward, self.backward))
        return forward, backward, busy + more


@dataclass(frozen=True, slots=True)
class _Pass:
    """computed: us of calls that talk to no other rank, of all and of those that stay, as of `Ask`. calls: how many
    there are in all. talking: the others."""

    computed: Pair
    calls: Pair
    talking: tuple[Ask, ...]

    @classmethod
    def of(cls, asks: Sequence[Ask], machine: Machine, is_still: bool) -> _Pass:
        loads = [(ask, still(ask.load) if is_still else ask.load) for ask in asks]
        alone = [(ask, load_us(load, Mesh(()), machine)) for ask, load in loads if load is not None and not load.link]
        talking = tuple(replace(ask, load=load) for ask, load in loads if load is not None and load.link)
        return cls(_sum(alone), _sum((ask, 1.0) for ask in asks), talking)

    def us(self, mesh: Mesh, machine: Machine, line: Line) -> tuple[float, float]:
        """us at least, and of the device."""
        times = [(ask, load_us(ask.load, mesh, machine)) for ask in self.talking]
        moved = line(*_sum(each for each in times if each[0].load.link not in (RING, TURNS)))
        turns = line(*_sum(each for each in times if each[0].load.link in (RING, TURNS)))
        hosted = line(*(calls * machine.launch_us for calls in self.calls))
        if machine.is_host:
            busy = line(*self.computed) + turns + moved
            return busy + hosted, busy + hosted
        busy = line(*self.computed) + turns + machine.device.communicating * moved
        return max(busy, moved, hosted), busy


def _sum(times: Iterable[tuple[Ask, float]]) -> Pair:
    """times: of one of the equal calls of each."""
    all_ = stay = 0.0
    for ask, us in times:
        all_, stay = all_ + ask.count * us, stay + ask.stay * us
    return all_, stay


def rank_flops(program: Program, times: Callable[[fx.Node], int]) -> float:
    """The FLOPs that one rank's products compute at least. times: how often each call counts."""
    products = (node for node in program.calls() if record(node).flops)
    return sum(times(node) * least_flops(node, program.mesh) for node in products if times(node))


def _casts(prologue: Program) -> Iterator[str]:
    """The names of casts of parameters, which are made once a step."""
    own = {node for node, _ in prologue.parameters()}
    for node, out in prologue.leaving:
        if node is not None and node.target is CAST and node.all_input_nodes[0] in own:
            yield out.name


def _asks(kind: str, graph: Program, rest: Rest, casts: Collection[str]) -> Iterator[Ask]:
    counts, stays = Counter[tuple[Load, float]](), Counter[tuple[Load, float]]()
    for node, load, fixed in _loads(kind, graph, rest, casts):
        counts[load, fixed] += rest.times(node)
        stays[load, fixed] += rest.times_beside(node)
    return (Ask(*asked, count, stays[asked]) for asked, count in counts.items())


def _loads(
    kind: str, graph: Program, rest: Rest, casts: Collection[str]
) -> Iterator[tuple[fx.Node, Load, float]]:  # fmt: skip
    """What each call asks for, and the bytes of that which are fixed."""
    stored = {node for node, entry in graph.entries if entry.kind == "parameter" or entry.name in casts}
    written = {root_of(node) for node, out in graph.leaving if node is not None and out.kind in GRADIENTS}
    once = {node for node, term in terms_of(sides_of(kind, graph, rest)) if term == SUM}  # a step, of a pipeline
    for (node, load), launch in zip(loads_of(graph).items(), launches_of(graph), strict=True):
        if load is None or launch is None or node in once:
            continue
        whole = operand_nodes(node)[1:] if node.target in LOOKUPS else operand_nodes(node)
        read = [operand for operand in whole if root_of(operand) in stored]
        fixed = sum(local_bytes(each, graph.mesh) for each in (*read, *[node] * (node in written)))
        yield node, load, fixed
