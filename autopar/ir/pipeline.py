"""A program cut into stages, with what every rank does in order: what `stages` and `schedule` make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.mesh import Mesh, axes_of_group, time_mesh
from autopar.ir.program import Program
from autopar.ir.schedule import KINDS, Action, Costs, Flow, Instruction


def graph_name(place: int, kind: str) -> str:
    """`forward_0` of a stage, `epilogue` of a rank."""
    return f"{KINDS[kind]}_{place}" if kind in "FBIW" else KINDS[kind]


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
    lists: of each rank of the pipeline, empty before `schedule`.
    """

    mesh: Mesh
    flow: Flow
    graphs: Mapping[tuple[int, str], Program]
    reductions: Mapping[str, Reduction]
    owners: Mapping[str, int]
    costs: Costs
    schedule: str = ""
    lists: tuple[tuple[Instruction, ...], ...] = ()

    @property
    def microbatches(self) -> int:
        return self.flow.microbatches

    @property
    def time(self) -> Mesh:
        """The axes in time, whose coordinates the number of a micro-batch (or of its slice) tells."""
        return time_mesh(self.flow.microbatches, self.flow.slices)

    @property
    def parts_text(self) -> str:
        """`8 micro-batches`, or `8 micro-batches of 4 slices`: what a step consists of."""
        count, slices = self.flow.microbatches // self.flow.slices, self.flow.slices
        return f"{count} micro-batch{'es' * (count > 1)}" + (f" of {slices} slices" if slices > 1 else "")

    def rank_of(self, parameter: str) -> int:
        """The rank of the pipeline that keeps a parameter."""
        return self.flow.ranks[self.owners[parameter]]

    def graphs_of(self, rank: int) -> dict[str, Program]:
        """The graphs that a rank runs, by name: `forward_0`, `backward_0`, ... and `epilogue`."""
        return {graph_name(*key): program for key, program in self.graphs.items() if self.place_of(key) == rank}

    def place_of(self, key: tuple[int, str]) -> int:
        """The rank of the pipeline that runs a graph."""
        return self.flow.rank_of(Action(*key))

    def times_of(self, key: tuple[int, str]) -> int:
        """How often a graph runs in a step."""
        return 1 if key[1] in "PE" else self.microbatches

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.flow.ranks) if owner == rank)

    def graph(self, action: Action) -> Program:
        return self.graphs[action.stage, action.kind]

    def with_(self, **changes: Any) -> Pipeline:
        return replace(self, **changes)
