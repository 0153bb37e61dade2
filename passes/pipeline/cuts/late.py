"""Values of parameters alone that ZeRO-3 gathers for each micro-batch, and that are needed once for all of them too."""

from __future__ import annotations

from torch import fx

from autopar.ir.program import Builder, Program, record, set_record
from autopar.passes.pipeline.cuts.when import NodeTimes, When

MADE_BY = "stages"


def gathered_late(program: Program, times: NodeTimes) -> Program:
    """A penalty on the parameters is added to the loss when all micro-batches are done, and a buffer that is made of
    parameters leaves then: for these the parameters are gathered once more, behind the micro-batches.

    So `%all_gather`, which the micro-batches read, has a copy `%all_gather_late`, which the sum of a penalty reads.

    times: those in which a value may be read both by micro-batches and late.
    """
    twice = _read_early(program, times)
    if not twice:
        return program
    build = Builder(MADE_BY)
    copies: dict[fx.Node, fx.Node] = {}

    def late(node: fx.Node) -> fx.Node:
        """What is read behind the micro-batches."""
        if node not in twice:
            return build.value[node]
        if node not in copies:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), late)
            copies[node] = build.graph.create_node(node.op, node.target, args, kwargs, name=f"{node.name}_late")
            set_record(copies[node], record(node))
        return copies[node]

    def put(node: fx.Node) -> fx.Node | None:
        is_late = node in times.late or node.op == "output" or times.of[node] in (When.MIDDLE, When.AFTER)
        return build.copy(node, late) if is_late and node not in twice and node.op != "placeholder" else None

    return build.rewrite(program, put)


def _read_early(program: Program, times: NodeTimes) -> set[fx.Node]:
    """Find the late values that micro-batches read too, by themselves or by way of one another."""
    early: set[fx.Node] = set()
    for node in reversed(program.nodes):
        if node in times.late and any(_is_early(user, times, early) for user in node.users):
            early.add(node)
    return early


def _is_early(user: fx.Node, times: NodeTimes, nodes: set[fx.Node]) -> bool:
    if user in times.late:
        return user in nodes
    return user.op != "output" and times.of[user] not in (When.MIDDLE, When.AFTER)
