"""sized_graphs: the graphs of a pipeline for slices of another length, with the numbers of these slices' program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.errors import VerificationError
from autopar.ir.program import Builder, Program, is_getitem, record, set_record
from autopar.passes.collectives.sized import Sized, by_layout
from autopar.passes.pipeline.cuts.action_graphs import MADE_BY, Key
from autopar.passes.pipeline.cuts.rematerialized import MADE_BY as RECOMPUTED

_CLONE = re.compile(r"_recomputed(_\d+)?\Z")
_SENT = re.compile(r"_[sp]\d+\Z")  # of a value of the batch, from the action or the prologue that made it


def sized_graphs(graphs: Mapping[Key, Program], local: Program, sized: Sized) -> dict[Key, Program]:
    """The graphs of the actions of a slice. local: the LOCAL program of such slices, of which every call has its
    arguments and its types; which calls there are, and where, was decided for slices of mean length."""
    calls = {node.name: node for node in local.graph.nodes}
    return {key: _sized(graph, calls, sized) for key, graph in graphs.items() if key[1] in "FBC"}


def _sized(graph: Program, calls: Mapping[str, fx.Node], sized: Sized) -> Program:
    build = Builder(MADE_BY)

    def put(node: fx.Node) -> fx.Node:
        made, twin = build.copy(node), _twin(node, calls)
        if twin is None:
            set_record(made, sized.record(record(node), by_layout(record(node).layouts)))
            return made
        if node.op == "call_function":
            made.args, made.kwargs = _with_numbers((made.args, dict(made.kwargs)), (twin.args, dict(twin.kwargs)))
        set_record(made, record(node).with_(types=record(twin).types, flops=record(twin).flops))
        return made

    return build.rewrite(graph, put, mesh=sized.mesh)


def _twin(node: fx.Node, calls: Mapping[str, fx.Node]) -> fx.Node | None:
    """The node of a slice's LOCAL program that one of a graph is, or computes again, or gets from another graph; None
    for what has no slices."""
    known = record(node)
    if node.op != "call_function":
        twin = calls.get(node.name) or calls.get(_SENT.sub("", node.name))
        return twin if twin is not None and record(twin).layouts == known.layouts else None
    name = _CLONE.sub("", node.name) if known.made_by == RECOMPUTED else node.name
    twin = calls.get(name)
    if twin is not None and twin.target is node.target:
        return twin
    if any(by_layout((*known.layouts, *known.operands))) and not is_getitem(node):
        raise VerificationError(f"%{node.name} ({node.target}) has no twin in the program of slices of another length")
    return None


def _with_numbers(ours: Any, theirs: Any) -> Any:
    """Arguments with the nodes of the one and the numbers of the other."""
    if isinstance(ours, fx.Node):
        if not isinstance(theirs, fx.Node) or (
            ours.op == theirs.op and ours.target is not theirs.target != "placeholder"
        ):
            raise VerificationError(f"%{ours.name} stands where slices of another length have {theirs}")
        return ours
    if isinstance(ours, (list, tuple)):
        return type(ours)(_with_numbers(*pair) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, dict):
        return {name: _with_numbers(value, theirs[name]) for name, value in ours.items()}
    return theirs
