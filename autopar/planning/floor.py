"""What a micro-batch takes at least, of fewer rows and on more ranks of cp than its program was made for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.mesh import Mesh, is_in_time
from autopar.ir.program import CAST, Program, operand_nodes, record, root_of
from autopar.machines import Machine
from autopar.passes.moved import LOOKUPS
from autopar.passes.node_costs import RING, TURNS, Load, least_flops, load_us, loads_of
from autopar.passes.streams import launches_of
from autopar.planning.depth import Rest
from autopar.planning.sheet import still
from autopar.planning.sides import SUM, sides_of, terms_of
from autopar.planning.stage import Micro

Line = Callable[[float, float], float]
GRADIENTS = frozenset(("gradient", "part"))  # kinds of outputs: of weights, and of the loss


@dataclass(frozen=True, slots=True)
class Ask:
    """What a call asks for. fixed: bytes that it reads or writes of parameters and their gradients, however few rows
    there are. stays: True if it is none of the layer that is left out."""

    load: Load
    fixed: float
    stays: bool

    @property
    def is_moved(self) -> bool:
        """True for a collective."""
        return self.load.link not in ("", RING, TURNS)

    def at(self, share: float) -> Load:
        """The load of a share of the rows."""
        load = self.load
        moved = self.fixed + (load.moved - self.fixed) * share
        results = tuple([result * share for result in load.results])
        sent = tuple([(times, size * share) for times, size in load.sent])
        return replace(
            load, flops=load.flops * share, squares=load.squares * share, moved=moved, results=results, sent=sent
        )  # fmt: skip


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

    def us(
        self, machine: Machine, mesh: Mesh, share: float, line: Line, is_still: bool = False
    ) -> tuple[float, float, float]:  # fmt: skip
        """us of the forward and of the backward pass at least, of a share of the rows, and of the device in both, however
        late its calls come. machine: one whose calls are the
        faster the larger they are. mesh: in which the ranks lie. line: from what all calls take, and those that are
        none of the layer that is left out, to what the whole model takes. is_still: as if what cp and ulysses move took
        no time.

        Whatever hides them, collectives take a part of the device from the calls beside them (`passes/streams.py`).
        """
        mesh = Mesh((*(pair for pair in self.mesh.axes if is_in_time(pair[0])), *mesh.axes))
        hidden = 1.0 if machine.is_host else machine.device.communicating

        def least(asks: Sequence[Ask]) -> tuple[float, float]:
            loads = (still(ask.at(share)) if is_still else ask.at(share) for ask in asks)
            times = [load_us(load, mesh, machine) for load in loads]
            moved = line(*_sums(asks, [time * ask.is_moved for time, ask in zip(times, asks, strict=True)]))
            computed = line(*_sums(asks, times)) - moved
            hosted = line(*_sums(asks, [machine.launch_us] * len(asks)))
            busy = computed + hidden * moved
            return max(busy, moved, hosted), busy

        (forward, busy), (backward, more) = least(self.forward), least(self.backward)
        return forward, backward, busy + more


def _sums(asks: Sequence[Ask], times: Sequence[float]) -> tuple[float, float]:
    """Of all, and of those that are none of the layer that is left out."""
    return sum(times), sum([time for time, ask in zip(times, asks, strict=True) if ask.stays])


def rank_flops(program: Program, counts: Callable[[fx.Node], bool] | None = None) -> float:
    """The FLOPs that one rank's products compute at least. counts: says which calls; None for all."""
    products = (node for node in program.calls() if record(node).flops and (counts is None or counts(node)))
    return sum(least_flops(node, program.mesh) for node in products)


def _casts(prologue: Program) -> Iterator[str]:
    """The names of casts of parameters, which are made once a step."""
    own = {node for node, _ in prologue.parameters()}
    for node, out in prologue.leaving:
        if node is not None and node.target is CAST and node.all_input_nodes[0] in own:
            yield out.name


def _asks(kind: str, graph: Program, rest: Rest, casts: Collection[str]) -> Iterator[Ask]:
    stored = {node for node, entry in graph.entries if entry.kind == "parameter" or entry.name in casts}
    written = {root_of(node) for node, out in graph.leaving if node is not None and out.kind in GRADIENTS}
    once = {node for node, term in terms_of(sides_of(kind, graph, rest)) if term == SUM}  # a step, of a pipeline
    for (node, load), launch in zip(loads_of(graph).items(), launches_of(graph), strict=True):
        if load is None or launch is None or node in once:
            continue
        whole = operand_nodes(node)[1:] if node.target in LOOKUPS else operand_nodes(node)
        read = [operand for operand in whole if root_of(operand) in stored]
        fixed = sum(local_bytes(each, graph.mesh) for each in (*read, *[node] * (node in written)))
        yield Ask(load, fixed, rest.counts(node))
