"""What a micro-batch costs on a stage, as a number outside of the equal layers and one for each of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from autopar.compiler.garbage import uncollected
from autopar.ir.measure import group_of
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record
from autopar.machines import Machine
from autopar.passes.node_costs import ranks_of
from autopar.planning.captures import KEPT, LEAST_ROWS, Captures
from autopar.planning.deal import Part, Sections, Share
from autopar.planning.depth import Rest
from autopar.planning.micro import HIGH, Micros
from autopar.planning.sheet import Sheet, described
from autopar.planning.split import Split
from autopar.planning.stage import Micro
from autopar.planning.states import Held, Stored, held, held_of_entry
from autopar.planning.step_time import products

ONCE = "CPE"  # actions that run once a step
Known = dict[Hashable, tuple[Sheet, Sheet]]  # by what is said of a graph
Place = tuple[Split, tuple[int, ...]]  # of ranks with nothing between them, and how many of each axis share a node


@dataclass(frozen=True, slots=True)
class Linear:
    """outside + layers * each. entry: the part of what is outside that comes before the layers."""

    outside: float
    each: float
    entry: float = 0.0

    def __call__(self, layers: float) -> float:
        return self.outside + layers * self.each

    def on(self, part: Part) -> Linear:
        """Of what has only a part of what is outside."""
        entry = part.entry * self.entry
        return Linear(entry + part.behind * (self.outside - self.entry), self.each, entry)

    @classmethod
    def of(cls, kept: int, whole: float, without_one: float, entry: float = 0.0) -> Linear:
        """Through what so many layers cost, and one less."""
        each = whole - without_one
        return cls(whole - kept * each, each, entry)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a rank, by its layers. forward, backward: us of a micro-batch; weights: the part of the backward pass that is
    computed apart, for gradients of weights; exposed: the part of both that waits for tp and cp.
    once: us of what is computed once a step. The rest are bytes: those of `Held`, and what one layer hands to the
    next."""

    forward: Linear
    backward: Linear
    weights: Linear
    exposed: Linear
    once: Linear
    parameters: Linear
    gradients: Linear
    states: Linear
    copies: Linear
    plain: Linear
    saved: Linear
    others: Linear
    inner: Linear
    first: Linear
    late: Linear
    made: Linear
    message: float = 0.0

    def on(self, share: Share) -> Cost:
        """Of a rank, or a stage, that has a share of the model; its layers are the share's."""
        parts = dict.fromkeys(("forward", "backward", "weights", "exposed", "once"), share.time)
        parts |= dict.fromkeys(("saved", "late", "made"), share.saved)
        peaks = ("others", "inner", "first")
        lines = (each.name for each in fields(self) if each.name not in (*peaks, "message"))
        return replace(self, **{name: getattr(self, name).on(parts.get(name, share.stored)) for name in lines})


@dataclass(frozen=True, slots=True)
class Sheets:
    """The programs of a micro-batch as numbers. sheets: by kind of each graph when it is finished, and of what it is
    without one of the layers. stored: parameters, with that layer and without. message: bytes that one equal layer
    hands on."""

    sheets: Mapping[str, tuple[Sheet, Sheet]]
    stored: tuple[Stored, Stored]
    message: float

    @classmethod
    def of(cls, micro: Micro, rest: Rest, known: Known) -> Sheets:
        """rest: all but one of the equal layers. known: the sheets of graphs that run once a step, which are mostly the
        same for all rows and however much is computed again."""
        sheets: dict[str, tuple[Sheet, Sheet]] = {}
        for kind, graph in micro.graphs.items():
            key = (kind, micro.plan.mesh, *described(graph)) if kind in ONCE else None
            sheets[kind] = known.get(key) or _both(micro, kind, rest)
            if key is not None:
                known[key] = sheets[kind]
        stored = Stored.of(micro.program, replace(rest, path="")), Stored.of(micro.program, rest)
        return cls(sheets, stored, micro.message)

    def between(self, other: Sheets, share: float) -> Sheets | None:
        """Those at a share of the way to others, 0 to 1; None where the graphs are not alike."""
        if self.sheets.keys() != other.sheets.keys():
            return None
        found: dict[str, tuple[Sheet, Sheet]] = {}
        for kind, low in self.sheets.items():
            high = other.sheets[kind]
            whole = low[0].between(high[0], share)
            is_one = low[0] is low[1] and high[0] is high[1]
            less = whole if is_one else low[1].between(high[1], share)
            if whole is None or less is None:
                return None
            found[kind] = whole, less
        message = self.message + (other.message - self.message) * share
        return Sheets(found, self.stored, message)

    def cost(self, machine: Machine, is_less: bool) -> dict[str, float]:
        """What the programs cost, by the names of `Cost`. is_less: without one of the layers."""
        graphs = {kind: pair[is_less] for kind, pair in self.sheets.items()}
        spent = {kind: sheet.ran(sheet.times(machine), machine, is_less) for kind, sheet in graphs.items()}
        once = sum(ran.total for kind, ran in spent.items() if kind in ONCE)
        exposed = sum(sum(ran.exposed.values()) for kind, ran in spent.items() if kind not in ONCE)
        backward = sum(ran.total for kind, ran in spent.items() if kind in "BIW")
        kept = held(self.stored[is_less], graphs, is_less)
        bytes_ = {name: float(getattr(kept, name)) for name in Held.__slots__}
        weights = spent["W"].total if "W" in spent else 0.0
        times = {"forward": spent["F"].total, "backward": backward, "weights": weights}
        return {**times, "once": once, "exposed": exposed, **bytes_}

    def entry(self, machine: Machine) -> dict[str, float]:
        """The part of some of these that belongs to what comes before the equal layers."""
        whole = {kind: pair[False] for kind, pair in self.sheets.items()}
        spent = {kind: sheet.entry_us(sheet.times(machine)) for kind, sheet in whole.items()}
        backward = sum(us for kind, us in spent.items() if kind in "BIW")
        times = {"forward": spent["F"], "backward": backward, "weights": spent.get("W", 0.0)}
        return {**times, **held_of_entry(self.stored[False], whole)}


def _both(micro: Micro, kind: str, rest: Rest) -> tuple[Sheet, Sheet]:
    """The sheet of a graph, and of what it is without a layer: of what is done once a step, another graph."""
    graph = micro.graphs[kind]
    whole = Sheet.of(kind, micro.finished(graph), rest)
    shorter = rest.cut_out(graph) if kind in ONCE and rest.path else None
    return whole, whole if shorter is None else Sheet.of(kind, micro.finished(shorter), rest)


class Layers:
    """The costs of micro-batches, read off programs of few layers: what a layer costs is what they cost less without
    it."""

    def __init__(self, captures: Captures, options: StepOptions, machine: Machine) -> None:
        self.micros = Micros(captures, options, machine)
        self._least: dict[tuple[Split, int], float] = {}
        self._known: dict[tuple[Place, int, str, bool], Cost] = {}
        self._sections: dict[tuple[Split, str, bool], Sections] = {}
        self._stages: dict[tuple[Split, str, bool, int], tuple[Share, ...]] = {}
        self._sheets: dict[tuple[Place, str, bool], dict[int, Sheets]] = {}  # by rows
        self._once: Known = {}

    @property
    def equal(self) -> int:
        """The equal layers of the model; 0 if it has none."""
        return self.micros.captures.shallow().layers

    @property
    def whole(self) -> Program:
        """The captured step of LEAST_ROWS rows."""
        return self.micros.captures.whole.program

    def products(self) -> tuple[float, str]:
        """The FLOPs of the products of one row, known once there are layouts, and the dtype of most of them."""
        program = dict(self.micros.local(Split(), self.micros.low).history)["propagate"]
        counts, rest = products(program), self._rest
        whole = float(sum(counts.values()))
        less = float(sum(record(node).flops for node in program.calls() if rest.counts(node)))
        flops = self._line(whole, less)(self.equal) / LEAST_ROWS
        return flops, max(counts, key=lambda name: counts[name], default="float32")

    def cost(self, split: Split, rows: int, recompute: str, halves: bool = False) -> Cost:
        """Of a micro-batch of `rows` on the ranks of tp and cp (`Micros.micro`). Where they lie changes times alone,
        and what is done to hide collectives, not the layouts. Raises AutoparError as `Micros.local`."""
        key = self._place(split), rows, recompute, halves
        if key not in self._known:
            self._known[key] = self._cost(self.sheets(split, rows, recompute, halves), self.micros.machine)
        return self._known[key]

    @uncollected()
    def sheets(self, split: Split, rows: int, recompute: str, halves: bool = False) -> Sheets:
        """The programs of a micro-batch as numbers: those of other rows lie on a line between the nearest ones that
        were read off programs, where these are alike. Raises AutoparError as `Micros.local`."""
        made = self._sheets.setdefault((self._place(split), recompute, halves), {})
        if rows not in made:
            if self.micros.low < rows < HIGH and self.micros.is_alike(split.near):
                for end in (self.micros.low, HIGH):
                    self.sheets(split, end, recompute, halves)
                below, above = max(at for at in made if at < rows), min(at for at in made if at > rows)
                found = made[below].between(made[above], (rows - below) / (above - below))
                if found is not None:
                    return found
            micro = self.micros.micro(split.near, rows, recompute, halves)
            made[rows] = Sheets.of(micro.placed(split.placed) if split.around else micro, self._rest, self._once)
        return made[rows]

    def notes(self, split: Split, rows: int, recompute: str) -> tuple[str, ...]:
        """What a person should know of the program of such a micro-batch."""
        split = split.near
        is_alike = rows < HIGH and self.micros.is_alike(split)
        return self.micros.micro(split, self.micros.low if is_alike else rows, recompute).program.notes

    def least_us(self, split: Split, rows: int = HIGH) -> float:
        """What a row takes at least, of a micro-batch of at most so many: as one of so many takes, on a machine whose
        calls are the faster the larger they are."""
        if (split.near, rows) not in self._least:
            cost = self._cost(self.sheets(split.near, rows, "none"), self.micros.machine.rising())
            self._least[split.near, rows] = (cost.forward(self.equal) + cost.backward(self.equal)) / rows
        return self._least[split.near, rows]

    def part(self, split: Split) -> float:
        """The part of the products of a micro-batch that each rank of a split computes."""
        low = self.micros.low
        whole = _products(self.micros.local(Split(), low).program)
        return _products(self.micros.local(split, low).program) / whole if whole else 1.0

    @cached_property
    def _rest(self) -> Rest:
        return Rest.of(self.micros.captures.shallow())

    def _cost(self, sheets: Sheets, machine: Machine) -> Cost:
        whole = sheets.cost(machine, is_less=False)
        less = sheets.cost(machine, is_less=True) if self.equal else whole
        entry = sheets.entry(machine) if self.equal else {}
        lines = {name: self._line(whole[name], less[name], entry.get(name, 0.0)) for name in whole}
        return Cost(**lines, message=sheets.message)

    def _line(self, whole: float, less: float, entry: float = 0.0) -> Linear:
        return Linear.of(KEPT, whole, less, entry) if self.equal else Linear(whole, 0.0)

    def stages(self, split: Split, recompute: str, mesh: Mesh, count: int) -> tuple[Share, ...]:
        """What each of so many stages of a pipeline has (`Sections.stages`), by the times of the fewest rows. mesh:
        that says over which links stages send."""
        near = group_of(mesh, PIPELINE, self.micros.machine.ranks).nodes == 1
        key = split.near, recompute, near
        if key not in self._sections:
            micro = self.micros.micro(split.near, self.micros.low, recompute)
            self._sections[key] = Sections.of(micro, self._rest, self.micros.machine, mesh)
        if (*key, count) not in self._stages:
            self._stages[*key, count] = tuple(self._sections[key].stages(self.equal, count))
        return self._stages[*key, count]

    def _place(self, split: Split) -> Place:
        return split.near, split.inside(self.micros.machine.ranks)


def _products(program: Program) -> float:
    """The FLOPs of the products of one rank."""
    return sum(record(node).flops / ranks_of(node, program.mesh) for node in program.calls() if record(node).flops)
