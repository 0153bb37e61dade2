"""A program cut into stages, with what every rank does in order: what `stages` and `schedule` make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.mesh import Mesh, axes_of_group, time_mesh
from autopar.ir.program import Program
from autopar.ir.schedule import KINDS, ONCE_KINDS, Action, Costs, Flow, Instruction


def graph_name(place: int, kind: str, length: int = 0) -> str:
    """`forward_0` of a stage, `forward_0_of_512` for slices of another length, `epilogue` of a rank."""
    return (f"{KINDS[kind]}_{place}" if kind in "FBIW" else KINDS[kind]) + (f"_of_{length}" if length else "")


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of a pipeline. length: of the slices that it is for, 0 for those of the first one and where they are all
    alike. times: how often it runs in a step."""

    name: str
    key: tuple[int, str]
    length: int
    program: Program
    times: int

    @property
    def place(self) -> tuple[int, str, int]:
        """What tells it from all others: stage or rank, kind, length."""
        return *self.key, self.length


@dataclass(frozen=True, slots=True)
class Join:
    """How the parts along an axis in time are taken together: their sum, max, min or logsumexp; or `gather`, side by
    side on a dim that reads (outer, parts, rest)."""

    kind: str
    axis: str
    dim: int = 0
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a value of the step is made of its parts: one join after the other. What has none along an axis is the same
    in all parts along it."""

    joins: tuple[Join, ...]

    def is_sum(self, time: Mesh) -> bool:
        """True for the sum of all parts."""
        (first, *more), axes = self.joins, set(axes_of_group(self.joins[0].axis))
        return not more and first.kind == "sum" and all(size == 1 or axis in axes for axis, size in time.axes)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The graphs of all stages and the lists of all ranks.

    mesh: of the devices, with "pp" if there are several ranks of a pipeline. graphs: by (stage, kind); of the kinds C,
    P and E by rank. C is run for all micro-batches side by side, and gives the prologue what they add up to.
    reductions: the values of the step that micro-batches add up to. owners: the stage that keeps each parameter, by its
    first name.
    lists: of each rank of the pipeline, empty before `schedule`. sized: where slices differ in length, the graphs of
    each length but that of the first slice, whose graphs are among the others; what runs once a step has no others.
    notes: what a user may want to know of the order.
    """

    mesh: Mesh
    flow: Flow
    graphs: Mapping[tuple[int, str], Program]
    reductions: Mapping[str, Reduction]
    owners: Mapping[str, int]
    costs: Costs
    schedule: str = ""
    lists: tuple[tuple[Instruction, ...], ...] = ()
    sized: Mapping[int, Mapping[tuple[int, str], Program]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        return self.flow.microbatches

    @property
    def time(self) -> Mesh:
        """The axes in time, whose coordinates the number of a micro-batch (or of its slice) tells."""
        return time_mesh(self.flow.microbatches, self.flow.slices, self.flow.lengths)

    @property
    def parts_text(self) -> str:
        """`8 micro-batches`, or `8 micro-batches of 4 slices`: what a step consists of."""
        count, slices = self.flow.microbatches // self.flow.slices, self.flow.slices
        lengths = f" ({', '.join(map(str, self.flow.lengths))} positions)" if self.flow.lengths else ""
        return f"{count} micro-batch{'es' * (count > 1)}" + (f" of {slices} slices{lengths}" if slices > 1 else "")

    def rank_of(self, parameter: str) -> int:
        """The rank of the pipeline that keeps a parameter."""
        return self.flow.ranks[self.owners[parameter]]

    def graphs_of(self, rank: int) -> dict[str, Program]:
        """The graphs that a rank runs, by name: `forward_0`, `backward_0`, ... and `epilogue`."""
        return {one.name: one.program for one in self.every_graph() if self.place_of(one.key) == rank}

    def every_graph(self) -> Iterator[Graph]:
        """All graphs, those of slices of other lengths behind their first one."""
        for key, program in self.graphs.items():
            yield Graph(graph_name(*key), key, 0, program, self.times_of(key))
            for length, graphs in self.sized.items():
                if key in graphs:
                    yield Graph(graph_name(*key, length), key, length, graphs[key], self.times_of(key, length))

    def place_of(self, key: tuple[int, str]) -> int:
        """The rank of the pipeline that runs a graph."""
        return self.flow.rank_of(Action(*key))

    def times_of(self, key: tuple[int, str], length: int = 0) -> int:
        """How often a graph runs in a step. length: of the slices that it is for; 0 for those of the first one."""
        if key[1] in ONCE_KINDS:
            return 1
        lengths = self.flow.lengths or (0,)
        return self.microbatches // len(lengths) * lengths.count(length or lengths[0])

    def length_of(self, action: Action) -> int:
        """The slices whose graph an action runs: their length, or 0 for that of the first one."""
        length = self.flow.length_of(action)
        return length if (action.stage, action.kind) in self.sized.get(length, {}) else 0

    def graph_place(self, action: Action) -> tuple[int, str, int]:
        """What tells the graph that an action runs from all others, as `Graph.place`."""
        return action.stage, action.kind, self.length_of(action)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.flow.ranks) if owner == rank)

    def graph(self, action: Action) -> Program:
        return self.sized.get(self.length_of(action), self.graphs)[action.stage, action.kind]

    def with_(self, **changes: Any) -> Pipeline:
        return replace(self, **changes)
