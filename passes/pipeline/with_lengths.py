"""with_lengths: the pipeline of slices of mean length becomes that of slices of equal work, or of the asked lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.errors import PlanError, VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.mesh import SLICE
from autopar.ir.ops.ops import op
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Level, Program, TensorType, is_getitem, operand_nodes, record, set_record
from autopar.ir.schedule import ONCE_KINDS
from autopar.passes.collectives.partition import partition
from autopar.passes.collectives.sized import Sized, by_layout, sized_program, unit_of
from autopar.passes.pipeline.cuts.action_graphs import MADE_BY, Key
from autopar.passes.pipeline.cuts.rematerialized import MADE_BY as RECOMPUTED
from autopar.passes.pipeline.slice_lengths import equal_work, grain_of, terapipe, time_of
from autopar.passes.pipeline.stages import border_types
from autopar.passes.schedules import simulate
from autopar.passes.schedules.transfers import Lists

# sized_graphs: the graphs of a pipeline for slices of another length, with the numbers of these slices' program.

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


GAIN = 0.02  # of a step: what less would win is not worth a program for each length


def with_lengths(pipeline: Pipeline, plan: Plan, explicit: Program) -> Pipeline:
    """STAGED -> STAGED. The graphs of each length that slices have, for those of a slice of mean length.

    Which calls there are and on which stage each is, was decided for slices of mean length; the programs of the other
    lengths differ from that in numbers alone: shapes, and where a slice begins. explicit: the program before partition,
    of which they are made.
    """
    lengths = plan.slice_lengths
    unit = unit_of(explicit, sum(lengths))
    if wrong := [length for length in lengths if length % unit]:
        raise PlanError(
            f"slices={list(lengths)}: the layouts of the step (and the chunks of its logits) divide slices into {unit} "
            f"parts, but one has {wrong[0]} positions. Use multiples of {unit}, or slices={len(lengths)}."
        )
    graphs = {length: _graphs(pipeline, plan, explicit, length) for length in dict.fromkeys(lengths)}
    types = {length: _types(of_length) for length, of_length in graphs.items()}
    once = {key: graph.with_(mesh=plan.layout_mesh) for key, graph in pipeline.graphs.items() if key[1] in ONCE_KINDS}
    first = graphs.pop(lengths[0])
    return pipeline.with_(
        graphs=dict(sorted({**once, **first}.items())),
        sized=graphs,
        flow=replace(pipeline.flow, lengths=lengths, sized=types),
        costs=pipeline.costs.with_lengths(lengths),
    )


def _graphs(pipeline: Pipeline, plan: Plan, explicit: Program, length: int) -> dict[Key, Program]:
    local = partition(explicit, plan, length)
    verify(local, Level.LOCAL)
    return sized_graphs(pipeline.graphs, local, sized_program(explicit, plan.layout_mesh, length))


def _types(graphs: dict[Key, Program]) -> dict[str, TensorType]:
    """The types of what goes from graph to graph."""
    return {name: type_ for graph in graphs.values() for name, type_ in border_types(graph, ("saved",)).items()}


def slice_lengths(
    pipeline: Pipeline, plan: Plan, explicit: Program, lists_of: Callable[[Pipeline], Lists]
) -> tuple[int, ...]:
    """The lengths of slices that end a step soonest; none where equal ones are about as good.

    explicit: the program before partition. lists_of: the instructions of a pipeline, for the costs that it has.
    """
    positions = _positions(explicit)
    if not positions:
        return ()
    unit = grain_of(unit_of(explicit, positions), positions, plan.slices)
    time = time_of(pipeline.costs, positions // unit)
    if plan.options.schedule == "gpipe":
        found = terapipe(time, positions // unit, plan.slices, plan.ranks_of_pipeline, plan.microbatches)
    else:
        found = equal_work(time, positions // unit, plan.slices)
    lengths = tuple(unit * length for length in found)
    if len(set(lengths)) == 1:
        return ()
    other = pipeline.with_(costs=pipeline.costs.with_lengths(lengths))
    equal, chosen = (simulate(lists_of(one), one.flow, one.costs).span_us for one in (pipeline, other))
    return lengths if chosen < (1 - GAIN) * equal else ()


def _positions(program: Program) -> int:
    """The length of the sequence that slices see what lies before them of; 0 if none does."""
    for node in program.calls():
        if node.target is op("earlier"):
            dim = node.args[2]
            assert isinstance(dim, int) and SLICE in record(operand_nodes(node)[0]).layout.dims[dim]
            return record(node).type.shape[dim]
    return 0
