"""with_lengths: the pipeline of slices of mean length becomes that of slices of equal work, or of the asked lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.check.check_levels import verify
from autopar.ir.mesh import SLICE
from autopar.ir.ops.ops import op
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, TensorType, operand_nodes, record
from autopar.ir.schedule import ONCE_KINDS
from autopar.passes.collectives.partition import partition
from autopar.passes.collectives.sized import sized_program, unit_of
from autopar.passes.pipeline.cuts.action_graphs import Key
from autopar.passes.pipeline.sized_graphs import sized_graphs
from autopar.passes.pipeline.slice_lengths import equal_work, grain_of, terapipe, time_of
from autopar.passes.pipeline.stages import border_types
from autopar.passes.schedules import simulate
from autopar.passes.schedules.transfers import Lists

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
