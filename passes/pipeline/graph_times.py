"""The times of a pipeline's graphs, of which those of slices of sequences grow with their place."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.measure import group_of
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.schedule import Costs
from autopar.passes.collectives.carried import sees_before
from autopar.passes.costs.node_costs import node_times
from autopar.passes.pipeline.cuts.action_graphs import Key


def costs_of(program: Program, graphs: Mapping[Key, Program], plan: Plan) -> Costs:
    """The times of graphs that were cut out of a LOCAL program."""
    machine = plan.fixed.machine
    times = {node.name: time for node, time in node_times(program, machine).items()}
    spent = dict.fromkeys(((place, _action_of(kind)) for place, kind in graphs), 0.0)
    growing: dict[Key, float] = {}
    for (place, kind), graph in graphs.items():
        spent[place, _action_of(kind)] += sum(times[node.name] for node in graph.calls())
        if plan.slices > 1:
            growing[place, kind] = sum(times[node.name] for node in graph.calls() if sees_before(node))
    line = machine.message_line(group_of(plan.mesh, PIPELINE, machine.ranks))
    return Costs(spent, *line, growing, plan.slices)


def _action_of(kind: str) -> str:
    """The action that runs a graph: the prologue begins with its counts."""
    return "P" if kind == "C" else kind
