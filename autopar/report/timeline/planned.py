"""The timeline of a plan that nobody compiled: its first micro-batches, and what comes once a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.ops.measure import human
from autopar.ir.schedule import ONCE, Action, Timeline
from autopar.planning.planner import Planned
from autopar.planning.price.cost import Cost
from autopar.planning.price.pipelined import cost_of, pipeline_of
from autopar.planning.price.predict import Prediction
from autopar.planning.space.candidates import Candidate
from autopar.report.timeline.picture import Lane, Picture, TimeBlock, time_text

FIRST = 8  # micro-batches that are drawn without a pipeline


def planned_picture(planned: Planned, made: Prediction) -> Picture:
    """A lane for each rank of the pipeline, or one for all ranks without."""
    plan = made.candidate
    if plan.pp == 1:
        count = min(plan.microbatches, FIRST)
        lanes = [Lane(0, tuple(_one_by_one(cost_of(plan, planned.programs), planned.model.layers, count)), (), 0.0)]
    else:
        timeline, count = pipeline_of(plan, planned.programs, planned.asked.machine)
        lanes = [Lane(rank, _blocks(timeline, rank, plan), (), timeline.bubble(rank)) for rank in range(plan.pp)]
    end = max(block.end_us for lane in lanes for block in lane.blocks)
    once = f"sums and gathers over the data axes {time_text(made.data)}, AdamW {time_text(made.optimizer)}"
    length = end + made.data + made.optimizer
    last = [replace(lane, blocks=(*lane.blocks, _once(lane.rank, end, length, once))) for lane in lanes]
    part = "" if count == plan.microbatches else f"the first {count} of {plan.microbatches} micro-batches; "
    captions = str(plan), f"{time_text(made.total)} a step, {human(made.memory)} a device; {part}then {once}"
    return Picture(tuple(last), length, captions, count)


def _once(rank: int, start: float, end: float, text: str) -> TimeBlock:
    return TimeBlock(Action(rank, "E", ONCE), start, end, text)


def _one_by_one(cost: Cost, layers: int, count: int) -> Iterator[TimeBlock]:
    at = 0.0
    for number in range(count):
        for kind, us in (("F", cost.forward(layers)), ("B", cost.backward(layers))):
            yield TimeBlock(Action(0, kind, number), at, at + us)
            at += us


def _blocks(timeline: Timeline, rank: int, plan: Candidate) -> tuple[TimeBlock, ...]:
    first = min(span.start_us for spans in timeline.ranks for span in spans)
    return tuple(
        TimeBlock(action, span.start_us - first, span.end_us - first, "", action.stage // plan.pp, plan.chunks)
        for span in timeline.runs(rank)
        if (action := span.instruction.action).kind in "FBIW"
    )
