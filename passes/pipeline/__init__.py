"""How is a LOCAL program cut into stages, their actions ordered, and the order proven?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from autopar.errors import LayoutError, ScheduleError
from autopar.ir.check.check_levels import verify_pipeline
from autopar.ir.ops.measure import human
from autopar.ir.ops.ops import AWAITED
from autopar.ir.options import STAGE, STAGE_AND_LAYERS
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.schedule import Pair, Turn, actions_of
from autopar.passes.costs.streams import run, run_pair
from autopar.passes.fuse import fuse
from autopar.passes.offload.host_parameters import host_parameters_of_stages
from autopar.passes.offload.offload_stages import offload_stages
from autopar.passes.overlap.bucket import bucket
from autopar.passes.overlap.decompose import decompose
from autopar.passes.overlap.overlap import overlap
from autopar.passes.overlap.prefetch import prefetch
from autopar.passes.pipeline.cuts.action_graphs import Key, Places
from autopar.passes.pipeline.cuts.assign import timed
from autopar.passes.pipeline.cuts.coupling import Coupling, check_middle
from autopar.passes.pipeline.cuts.undivided import check_once
from autopar.passes.pipeline.stages import split_into_stages
from autopar.passes.pipeline.with_lengths import slice_lengths, with_lengths
from autopar.passes.schedules import (
    Schedule,
    apart,
    check_schedule,
    forward_only,
    in_flight,
    in_halves,
    parse_schedule,
    turns_between,
    with_transfers,
)
from autopar.passes.schedules.transfers import Lists

__all__ = ["make_pipeline"]


def make_pipeline(program: Program, plan: Plan, explicit: Program | None = None) -> Pipeline:
    """LOCAL -> STAGED. The graphs of all stages, and the instruction list of each rank of the pipeline, with the proof
    that the lists run to their end. Two stages, forward only (a rank's list stands behind the graphs):

        mesh: pp=2
        microbatches: 2
        LOCAL program on mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[2,8] of [4,8] [mb,-] = batch "0"
        %mul: f32[2,8] of [4,8] [mb,-] = aten.mul.Tensor(%x, %w)
        %exp: f32[2,8] of [4,8] [mb,-] = aten.exp.default(%mul)
        %sum_1: f32[] [] partial(mb) = aten.sum.default(%exp)
        %all_reduce: f32[] [] = autopar.all_reduce.default(%sum_1, "mb", "sum")
        return loss "loss" = %all_reduce
    becomes
        graph 0E
        STAGED program on mb=2
        %all_reduce: f32[] [] = step "all_reduce"
        return loss "loss" = %all_reduce
        graph 0F
        STAGED program on mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[2,8] of [4,8] [mb,-] = batch "0"
        %mul: f32[2,8] of [4,8] [mb,-] = aten.mul.Tensor(%x, %w)
        return saved "mul" = %mul
        graph 1E
        STAGED program on mb=2
        %all_reduce: f32[] [] = step "all_reduce"
        return loss "loss" = %all_reduce
        graph 1F
        STAGED program on mb=2
        %mul: f32[2,8] of [4,8] [mb,-] = saved "mul"
        %exp: f32[2,8] of [4,8] [mb,-] = aten.exp.default(%mul)
        %sum_1: f32[] [] partial(mb) = aten.sum.default(%exp)
        return part "all_reduce" = %sum_1
        rank 0
          0F0
          SEND 0F0 to rank 1: %mul
          0F1
          SEND 0F1 to rank 1: %mul
          RECV 1F1 from rank 1: %all_reduce
          0E
        rank 1
          RECV 0F0 from rank 0: %mul
          RECV 0F1 from rank 0: %mul
          1F0
          1F1
          SEND 1F1 to rank 0: %all_reduce
          1E

    explicit: the program before its partition; with it slices of a sequence may differ in length.

    Raises LayoutError for what cannot be cut, ScheduleError for what cannot be run.
    """
    ranks, trains = plan.ranks_of_pipeline, any(out.kind == "gradient" for out in program.outputs)
    wanted, stages = plan.options.schedule, _stages(plan)
    _check_count(program, stages or ranks)  # before there is an order of them all
    schedule = parse_schedule(wanted, ranks, plan.parts, stages, slices=plan.slices)
    beside = _in_pairs(schedule, plan)
    if plan.slices > 1 and schedule.kinds & {"I", "W"}:
        raise ScheduleError(
            f"slices={plan.slices}: schedule '{schedule.name}' runs the gradients of weights (W) apart from those of "
            f"inputs (I). Give the slices of a sequence whole backward actions (B)."
        )
    places = Places(schedule.ranks, bool(schedule.kinds & {"I", "W"}), _held(schedule))
    pipeline = split_into_stages(program, plan, places)
    if len(schedule.ranks) > 1 and plan.parts > 1:
        check_once(pipeline.graphs.values(), plan, partial(timed, program, plan))
    coupling = timed(program, plan)[1].coupling if pipeline.flow.waits_for_all() else None
    if coupling is not None:
        check_middle(pipeline.graphs.get((pipeline.flow.ranks[-1], "M")), coupling)
    if coupling is not None and not _all_forward_first(schedule):
        if wanted != "1f1b":
            raise ScheduleError(
                f"schedule '{schedule.name}' lets micro-batches go back before all have come forward, but "
                f"{coupling.cause}. Use schedule 'gpipe', which lets all come forward first, or microbatches=1."
            )
        return make_pipeline(program, replace(plan, options=replace(plan.options, schedule="gpipe")), explicit)

    def lists_of(pipeline: Pipeline) -> Lists:
        # once more, now that the times are known
        orders = in_halves(parse_schedule(wanted, ranks, plan.parts, stages, pipeline.costs, plan.slices).orders)
        orders = orders if trains or coupling else forward_only(orders)
        orders = apart(orders, lambda turn: _hides(pipeline, turn))
        # posted early, a receive goes on beside the graph before it; Gloo moves nothing that nobody has asked for
        return with_transfers(orders, pipeline.flow, pipeline.costs, prefetch=True)

    if explicit is not None and plan.slices > 1:
        is_open = isinstance(plan.options.slices, int)
        lengths = slice_lengths(pipeline, plan, explicit, lists_of) if is_open else plan.slice_lengths
        if lengths:
            plan = replace(plan, slice_lengths=lengths)
            pipeline = with_lengths(split_into_stages(program, plan, places), plan, explicit)
    pipeline = _rewritten(offload_stages(pipeline, program, plan, _between(schedule)), plan, beside)
    for graphs in (pipeline.graphs, *({**pipeline.graphs, **sized} for sized in pipeline.sized.values())):
        verify_pipeline(pipeline.with_(graphs=graphs), program)
    pipeline = _with_pairs(pipeline, plan, beside)
    lists = lists_of(pipeline)
    check_schedule(lists, pipeline.flow)
    notes = (*pipeline.notes, *((_held_note(pipeline, coupling, plan),) if coupling else ()))
    return pipeline.with_(lists=lists, schedule=schedule.name, notes=notes)


def _in_pairs(schedule: Schedule, plan: Plan) -> frozenset[tuple[Key, Key]]:
    """Find the graphs that run side by side: none where a compiler's code has the collectives in it."""
    if plan.options.compile == "inductor":
        return frozenset()
    turns = (turn.actions for order in in_halves(schedule.orders) for turn in order if isinstance(turn, Pair))
    return frozenset(((one.stage, one.kind), (other.stage, other.kind)) for one, other in turns)


def _hides(pipeline: Pipeline, turn: Turn) -> bool:
    """True for a pair in which one waits for what the other can hide."""
    return isinstance(turn, Pair) and any(_waits(pipeline.graph(action)) for action in turn.actions)


def _waits(graph: Program) -> bool:
    return any(node.target is AWAITED for node in graph.calls())


def _with_pairs(pipeline: Pipeline, plan: Plan, beside: Collection[tuple[Key, Key]]) -> Pipeline:
    """A pipeline whose costs say what a pair takes: less than both alone by what streams hide."""
    machine, times = plan.fixed.machine, pipeline.costs.times_us
    pairs: dict[tuple[Key, Key], float] = {}
    for keys in sorted(beside):
        first, second = (pipeline.graphs.get(key) for key in keys)
        if first is not None and second is not None:
            both_us = run(first, machine).total + run(second, machine).total
            hidden = max(0.0, both_us - run_pair(first, second, machine).total)
            pairs[keys] = max(0.0, sum(times[key] for key in keys) - hidden)
    return pipeline.with_(costs=replace(pipeline.costs, pairs_us=pairs))


def _rewritten(pipeline: Pipeline, plan: Plan, beside: Collection[tuple[Key, Key]]) -> Pipeline:
    """Rewrite the graphs of a pipeline by the passes that come after the cut."""
    paired = {key for keys in beside for key in keys}

    def rewritten(graphs: Mapping[Key, Program]) -> dict[Key, Program]:
        rewritten = {key: prefetch(graph, plan) for key, graph in graphs.items()}
        rewritten = {key: overlap(graph, plan, beside=key in paired) for key, graph in rewritten.items()}
        for step in (decompose, bucket):
            rewritten = {key: step(graph, plan) for key, graph in rewritten.items()}
        return rewritten

    def fused(graphs: Mapping[Key, Program]) -> dict[Key, Program]:
        return {key: fuse(graph, plan) for key, graph in graphs.items()}

    return _each(host_parameters_of_stages(_each(pipeline, rewritten), plan, beside), fused)


def _each(pipeline: Pipeline, step: Callable[[Mapping[Key, Program]], dict[Key, Program]]) -> Pipeline:
    """Rewrite the graphs of a pipeline, those of each length together."""
    sized = {length: step(graphs) for length, graphs in pipeline.sized.items()}
    return pipeline.with_(graphs=step(pipeline.graphs), sized=sized)


def _all_forward_first(schedule: Schedule) -> bool:
    """True if each rank lets all micro-batches come forward before the first goes back."""
    kinds = ([action.kind for action in actions_of(order)] for order in schedule.orders)
    orders = ("".join("F" if kind == "F" else "B" for kind in each) for each in kinds)
    return all("BF" not in order for order in orders)


def _held_note(pipeline: Pipeline, coupling: Coupling, plan: Plan) -> str:
    """What it costs that all micro-batches come forward before the first goes back."""
    flow = pipeline.flow
    kept = [0] * flow.size
    for (stage, kind), work in flow.works.items():
        if kind == "F":
            kept[flow.ranks[stage]] += flow.microbatches * sum(flow.types[name].bytes_ for name in work.writes)
    is_least = plan.options.recompute in (STAGE, STAGE_AND_LAYERS)
    return (
        f"all {flow.microbatches} micro-batches come forward before the first goes back (schedule gpipe), for "
        f"{coupling.cause}. Until then a rank keeps up to {human(max(kept))} of them"
        + ("" if is_least else f"; with recompute='{STAGE}' it keeps what enters a stage")
    )


def _stages(plan: Plan) -> int | None:
    """The number of stages, if the plan says it."""
    ranks, chunks, named = plan.ranks_of_pipeline, plan.options.chunks, plan.options.stages
    wanted = None if chunks is None else chunks * ranks
    if named is None:
        return wanted
    if len(named) % ranks or (wanted is not None and wanted != len(named)):
        raise ScheduleError(
            f"stages= names {len(named)} stages, but pp={ranks} has "
            + (f"{wanted}: {chunks} on each rank." if wanted else f"as many on each rank: {ranks}, {2 * ranks}, ...")
        )
    return len(named)


def _check_count(program: Program, stages: int) -> None:
    """Raise LayoutError for more stages than calls."""
    calls = sum(1 for _ in program.calls())
    if stages > calls:
        raise LayoutError(
            f"{stages} stages are more than the {calls} calls that they would share: fewer stages (a smaller pp, or "
            f"fewer chunks a rank) would do."
        )


def _between(schedule: Schedule) -> tuple[int, ...]:
    """The turns between the passes of a micro-batch on each stage."""
    orders = in_halves(schedule.orders)
    return tuple(turns_between(orders[rank], stage) for stage, rank in enumerate(schedule.ranks))


def _held(schedule: Schedule) -> tuple[int, ...]:
    """The micro-batches that each stage holds at once."""
    return tuple(in_flight(schedule.orders[rank], stage) for stage, rank in enumerate(schedule.ranks))
