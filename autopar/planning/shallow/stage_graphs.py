"""The graphs of a micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import Mesh, is_in_time
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.storage import kept_values, root_of
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import OF_GRAPHS, PASSES
from autopar.passes.fuse import fuse
from autopar.passes.overlap.bucket import bucket
from autopar.passes.pipeline.cuts.action_graphs import Places
from autopar.passes.pipeline.cuts.rematerialized import kept_across, originals
from autopar.passes.pipeline.stages import graphs_of_stages
from autopar.passes.recompute import recompute
from autopar.planning.shallow.depth import crossing, paths_of
from autopar.planning.shallow.sides import BEFORE, BEHIND


class LayerMessage(NamedTuple):
    """Bytes that one equal layer hands on. kept: of these, what a stage that begins with the next layer keeps for its
    backward pass; passed: what a stage that ends with this one keeps less for it than in one stage with the next."""

    bytes_: float = 0.0
    kept: float = 0.0
    passed: float = 0.0

    @classmethod
    def of(cls, program: Program, border: tuple[str, str]) -> LayerMessage:
        """border: two neighbouring layers; none if there are no equal ones."""
        if not border[0]:
            return cls()
        sides = _sides(program, border)
        apart, renamed = program, {node: node for node in sides}
        if originals(program):
            apart, renamed = kept_across(program, sides)  # as the compiler cuts there
        sides = {renamed[node]: side for node, side in sides.items() if node in renamed}
        readers = {value: {sides[one] for one in read} for value, read in kept_values(apart).items()}
        sent = {root_of(renamed[node]) for node in crossing(program, border)}

        def bytes_(nodes: Iterable[fx.Node]) -> float:
            return float(sum(local_bytes(node, program.mesh) for node in nodes))

        kept = (value for value in sent if BEHIND in readers.get(value, ()))
        own = bytes_(value for value, read in readers.items() if sides[value] == BEFORE and BEFORE in read)
        whole = bytes_(value for value in kept_values(program) if sides[renamed[value]] == BEFORE)
        return cls(bytes_(crossing(program, border)), bytes_(kept), whole - own)

    def between(self, other: LayerMessage, share: float) -> LayerMessage:
        """The message at a share of the way to another, 0 to 1."""
        return LayerMessage(*(low + (high - low) * share for low, high in zip(self, other, strict=True)))


NO_MESSAGE = LayerMessage()


def _sides(program: Program, border: tuple[str, str]) -> dict[fx.Node, int]:
    """Say of each call whether a stage runs it that ends with the first of two neighbouring layers, or the next one.
    What is computed again runs where it did at first."""
    (before, behind), paths, calls = border, paths_of(program), list(program.calls())
    number, stack = int(before.rpartition(".")[2]), before.rpartition(".")[0]
    of_next = [i for i, node in enumerate(calls) if paths.get(node) == behind]
    sides: dict[fx.Node, int] = {}
    for i, node in enumerate(calls):
        list_, _, own = paths.get(node, "").rpartition(".")
        is_behind = of_next[0] <= i <= of_next[-1]
        if node in paths and list_ == stack:
            is_behind = int(own) > number
        sides[node] = BEHIND if is_behind else BEFORE
    return {**sides, **{clone: sides[node] for clone, node in originals(program).items()}}


@dataclass(frozen=True, slots=True)
class Micro:
    """What a rank runs of a step of PARTS micro-batches. program: LOCAL. graphs: of its
    actions, by kind, before the passes that come after the cut. message: that one equal layer hands on.
    """

    plan: Plan
    program: Program
    graphs: Mapping[str, Program]
    message: LayerMessage

    def finished(self, graph: Program) -> Program:
        """A graph after the passes that come after the cut, but for the sums of gradients: how these move a plan says
        (`data_streams.py`). Nothing is verified here: what is chosen is compiled by `lower`, which does."""
        for step, _ in PASSES:
            graph = step(graph, self.plan) if step in OF_GRAPHS and step is not bucket else graph
        return graph

    def fused(self, graph: Program) -> Program:
        """A graph with the groups of calls that are one kernel, and nothing done to hide collectives."""
        return fuse(graph, self.plan)

    def placed(self, mesh: Mesh) -> Micro:
        """Place its ranks elsewhere: in a mesh with further axes between its own."""

        def moved(graph: Program) -> Program:
            in_time = tuple(pair for pair in graph.mesh.axes if is_in_time(pair[0]))
            return graph.with_(mesh=Mesh((*in_time, *mesh.axes)))

        graphs = {kind: moved(graph) for kind, graph in self.graphs.items()}
        return replace(self, program=moved(self.program), graphs=graphs)


@dataclass(frozen=True, slots=True)
class Uncut:
    """The step of a rank on one stage, that computes again what it is told to, before it is cut. message: that one
    equal layer hands on."""

    plan: Plan
    program: Program
    message: LayerMessage

    @classmethod
    @uncollected()
    def of(cls, local: Lowered, recomputed: str, border: tuple[str, str]) -> Uncut:
        """border: two neighbouring layers."""
        plan = replace(local.plan, options=replace(local.plan.options, recompute=recomputed))
        program = recompute(dict(local.history)["recompute"], plan)  # passes of graphs come after the cut
        return cls(plan, program, LayerMessage.of(program, border))

    @uncollected()
    def cut(self, halves: bool) -> Micro:
        """Its graphs. halves: gradients of weights apart from those of inputs."""
        one = Places((0,), split=halves, in_flight=(1,))
        graphs = {kind: graph for (_, kind), graph in graphs_of_stages(self.program, self.plan, one).items()}
        return Micro(self.plan, self.program, graphs, self.message)
