"""The graphs of a micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import Mesh, is_in_time
from autopar.ir.ops.measure import local_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import OF_GRAPHS, PASSES
from autopar.passes.fuse import fuse
from autopar.passes.overlap.bucket import bucket
from autopar.passes.pipeline.cuts.action_graphs import Places
from autopar.passes.pipeline.stages import graphs_of_stages
from autopar.passes.recompute import recompute
from autopar.planning.shallow.depth import crossing


@dataclass(frozen=True, slots=True)
class Micro:
    """What a rank runs of a step of PARTS micro-batches. program: LOCAL. graphs: of its
    actions, by kind, before the passes that come after the cut. message: bytes that one equal layer hands on.
    """

    plan: Plan
    program: Program
    graphs: Mapping[str, Program]
    message: float

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


@uncollected()
def cut_at(local: Lowered, recomputed: str, border: tuple[str, str], halves: bool) -> Micro:
    """The graphs of a step on one stage, that computes again what it is told to. border: two neighbouring layers.
    halves: gradients of weights apart from those of inputs."""
    plan = replace(local.plan, options=replace(local.plan.options, recompute=recomputed))
    program = recompute(dict(local.history)["recompute"], plan)  # passes of graphs come after the cut
    one = Places((0,), split=halves, in_flight=(1,))
    graphs = {kind: graph for (_, kind), graph in graphs_of_stages(program, plan, one).items()}
    sent = crossing(program, border) if border[0] else ()
    return Micro(plan, program, graphs, float(sum(local_bytes(node, program.mesh) for node in sent)))
