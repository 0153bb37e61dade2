"""Cut a LOCAL program into stages, order their actions, and prove the order."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.verify import verify_pipeline
from autopar.passes.bucket import bucket
from autopar.passes.pipeline.stages import Places, split_into_stages
from autopar.passes.prefetch import prefetch
from autopar.passes.schedules import Schedule, check_schedule, forward_only, in_flight, parse_schedule, with_transfers

__all__ = ["make_pipeline"]


def make_pipeline(program: Program, plan: Plan) -> Pipeline:
    """LOCAL -> STAGED. The graphs of all stages, and the instruction list of each rank of the pipeline, with the proof
    that the lists run to their end.

    Raises LayoutError for what cannot be cut, ScheduleError for what cannot be run.
    """
    ranks, trains = plan.ranks_of_pipeline, any(out.kind == "gradient" for out in program.outputs)
    wanted, stages = plan.options.schedule, _stages(plan)
    schedule = parse_schedule(wanted, ranks, plan.microbatches, stages)
    places = Places(schedule.ranks, bool(schedule.kinds & {"I", "W"}), _held(schedule))
    pipeline = split_into_stages(program, plan, places)
    graphs = {key: bucket(prefetch(graph, plan), plan) for key, graph in pipeline.graphs.items()}
    pipeline = pipeline.with_(graphs=graphs)
    verify_pipeline(pipeline, program)
    # once more, now that the times are known
    orders = parse_schedule(wanted, ranks, plan.microbatches, stages, pipeline.costs).orders
    orders = orders if trains else forward_only(orders)
    # posted early, a receive goes on beside the graph before it; Gloo moves nothing that nobody has asked for
    lists = with_transfers(orders, pipeline.flow, pipeline.costs, prefetch=True)
    check_schedule(lists, pipeline.flow)
    return pipeline.with_(lists=lists, schedule=schedule.name)


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


def _held(schedule: Schedule) -> tuple[int, ...]:
    """The micro-batches that each stage holds at once."""
    return tuple(in_flight(schedule.orders[rank], stage) for stage, rank in enumerate(schedule.ranks))
