"""What a micro-batch costs on a stage, as a number outside of the equal layers and one for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture import Captured
from autopar.compiler.garbage import uncollected
from autopar.ir.mesh import CONTEXT, axes_of_group
from autopar.ir.ops import is_collective
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record
from autopar.machines import Machine
from autopar.passes.node_costs import node_times, ranks_of
from autopar.passes.streams import WAIT, run
from autopar.planning.depth import Rest
from autopar.planning.micro import HIGH, KEPT, LOW, PARTS, Micros
from autopar.planning.split import Split
from autopar.planning.stage import Micro
from autopar.planning.states import Held, held
from autopar.planning.step_time import products

ONCE = "CPE"  # actions that run once a step
SUMS = "E"  # the one that adds up gradients over ranks


@dataclass(frozen=True, slots=True)
class Linear:
    """outside + layers * each."""

    outside: float
    each: float

    def __call__(self, layers: float) -> float:
        return self.outside + layers * self.each

    @classmethod
    def of(cls, kept: int, whole: float, without_one: float) -> Linear:
        """Through what so many layers cost, and one less."""
        each = whole - without_one
        return cls(whole - kept * each, each)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a rank, by its layers. forward, backward: us of a micro-batch; exposed: the part of both that waits for tp and
    cp. once: us of what is computed once a step. The rest are bytes: those of `Held`, and what one layer hands to the
    next."""

    forward: Linear
    backward: Linear
    exposed: Linear
    once: Linear
    parameters: Linear
    entry: Linear
    gradients: Linear
    states: Linear
    copies: Linear
    plain: Linear
    saved: Linear
    others: Linear
    message: float = 0.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A graph, and what its nodes take on a machine."""

    program: Program
    times: Mapping[fx.Node, float]

    @classmethod
    def of(cls, program: Program, machine: Machine) -> Timed:
        return cls(program, node_times(program, machine))


class Layers:
    """The costs of micro-batches, read off programs of few layers: what a layer costs is what they cost less without
    it.

    capture: the step of a batch of so many rows.
    """

    def __init__(self, capture: Callable[[int], Captured], options: StepOptions, machine: Machine) -> None:
        self.micros = Micros(capture, options, machine)
        self._least: dict[tuple[Split, int], float] = {}
        self._known: dict[tuple[Split, tuple[int, ...], int, str], Cost] = {}

    @property
    def equal(self) -> int:
        """The equal layers of the model; 0 if it has none."""
        return self.micros.shallow(LOW).layers

    @property
    def whole(self) -> Program:
        """The captured step of PARTS rows."""
        return self.micros.captured(LOW).program

    def products(self) -> tuple[float, str]:
        """The FLOPs of the products of one row, known once there are layouts, and the dtype of most of them."""
        program = dict(self.micros.local(Split(), LOW).history)["propagate"]
        counts, rest = products(program), self._rest
        whole = float(sum(counts.values()))
        less = float(sum(record(node).flops for node in program.calls() if rest.counts(node)))
        flops = self._line(whole, less)(self.equal) / PARTS
        return flops, max(counts, key=lambda name: counts[name], default="float32")

    def cost(self, split: Split, rows: int, recompute: str) -> Cost:
        """Of a micro-batch of `rows` on the ranks of tp and cp. Where they lie changes times alone, and what is done to
        hide collectives, not the layouts. Raises AutoparError as `Micros.local`."""
        key = split.near, split.inside(self.micros.machine.ranks), rows, recompute
        if key not in self._known:
            micro = self.micros.micro(split.near, rows, recompute)
            self._known[key] = self._cost(micro.placed(split.placed) if split.around else micro, self.micros.machine)
        return self._known[key]

    def notes(self, split: Split, rows: int, recompute: str) -> tuple[str, ...]:
        """What a person should know of the program of such a micro-batch."""
        return self.micros.micro(split.near, rows, recompute).program.notes

    def least_us(self, split: Split, rows: int = HIGH) -> float:
        """What a row takes at least, of a micro-batch of at most so many: as one of so many takes, on a machine whose
        calls are the faster the larger they are."""
        if (split.near, rows) not in self._least:
            cost = self._cost(self.micros.micro(split.near, rows, "none"), self.micros.machine.rising())
            self._least[split.near, rows] = (cost.forward(self.equal) + cost.backward(self.equal)) / rows
        return self._least[split.near, rows]

    def part(self, split: Split) -> float:
        """The part of the products of a micro-batch that each rank of a split computes."""
        whole = _products(self.micros.local(Split(), LOW).program)
        return _products(self.micros.local(split, LOW).program) / whole if whole else 1.0

    @property
    def _rest(self) -> Rest:
        return Rest.of(self.micros.shallow(LOW))

    @uncollected()
    def _cost(self, micro: Micro, machine: Machine) -> Cost:
        graphs = {kind: Timed.of(micro.finished(graph), machine) for kind, graph in micro.graphs.items()}
        rest = self._rest
        whole = _row(micro, graphs, replace(rest, path=""), machine)
        if not self.equal:
            return Cost(**{name: Linear(value, 0.0) for name, value in whole.items()}, message=micro.message)
        shorter = {kind: rest.cut_out(graph) for kind, graph in micro.graphs.items() if kind in ONCE}
        graphs |= {kind: Timed.of(micro.finished(graph), machine) for kind, graph in shorter.items() if graph}
        less = _row(micro, graphs, rest, machine)
        return Cost(**{name: self._line(whole[name], less[name]) for name in whole}, message=micro.message)

    def _line(self, whole: float, less: float) -> Linear:
        return Linear.of(KEPT, whole, less) if self.equal else Linear(whole, 0.0)


def _row(micro: Micro, graphs: Mapping[str, Timed], rest: Rest, machine: Machine) -> dict[str, float]:
    """What the programs cost without what is left out, by the names of `Cost`."""
    spent = {kind: run(graph.program, machine, _counted(kind, rest), graph.times) for kind, graph in graphs.items()}
    once = sum(ran.total for kind, ran in spent.items() if kind in ONCE)
    exposed = sum(sum(ran.exposed.values()) for kind, ran in spent.items() if kind not in ONCE)
    backward = sum(ran.total for kind, ran in spent.items() if kind in "BIW")
    kept = held(micro.program, {kind: graph.program for kind, graph in graphs.items()}, rest)
    bytes_ = {name: float(getattr(kept, name)) for name in Held.__slots__}
    return {"forward": spent["F"].total, "backward": backward, "once": once, "exposed": exposed, **bytes_}


def _counted(kind: str, rest: Rest) -> Callable[[fx.Node], bool]:
    """The nodes of a graph that cost something: not the sums of gradients over cp, which are taken over all data axes
    at once (`data_time.py`)."""
    if kind != SUMS:
        return rest.counts
    return lambda node: rest.counts(node) and not _is_over_context(node)


def _is_over_context(node: fx.Node) -> bool:
    moved = node.all_input_nodes[0] if node.target is WAIT else node
    return is_collective(moved.target) and CONTEXT in axes_of_group(str(moved.args[1]))


def _products(program: Program) -> float:
    """The FLOPs of the products of one rank."""
    return sum(record(node).flops / ranks_of(node, program.mesh) for node in program.calls() if record(node).flops)
