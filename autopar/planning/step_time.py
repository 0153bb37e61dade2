"""Simulate a step of the emitted programs on a machine: its time, and what the time is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.compiler.lowered import Lowered
from autopar.ir.layout import local_shape
from autopar.ir.measure import group_of
from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, TensorType, operand_nodes, record
from autopar.ir.schedule import Costs, Timeline
from autopar.machines import Machine
from autopar.passes.schedules.simulate import simulate
from autopar.passes.streams import Ran, run
from autopar.planning.report import StepTime

ADAMW = 7  # reads of weight, gradient and two moments, writes of all but the gradient, by a fused kernel


def step_time(compiled: Lowered, machine: Machine | None = None) -> StepTime:
    """The time of a step on a machine; by default on the one that the programs were made for.

    Ranks that differ by dp, tp or cp alone run the same program, so each place on pp is simulated once.
    """
    machine = machine or compiled.plan.fixed.machine
    mesh = compiled.mesh
    optimizer = {place: machine.memory_us(bytes_) for place, bytes_ in _states(compiled).items()}
    if compiled.pipeline is None:
        spent = run(compiled.program, machine)
        found = _Found(spent.total, spent, 0.0, optimizer[0])
    else:
        found = _of_pipeline(compiled.pipeline, machine, optimizer)
    spent = found.spent
    return StepTime(
        machine, str(mesh), mesh.size, found.end + found.optimizer, spent.computed, spent.exposed, spent.hosted,
        found.bubble, found.optimizer, spent.calls, *_flops(compiled), tokens_of(compiled.program), found.timeline,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """Of the slowest rank. end: of its last action; spent: what all of them take."""

    end: float
    spent: Ran
    bubble: float
    optimizer: float
    timeline: Timeline | None = None


def _of_pipeline(pipeline: Pipeline, machine: Machine, optimizer: Mapping[int, float]) -> _Found:
    spent = {key: run(graph, machine) for key, graph in pipeline.graphs.items()}
    timeline = simulate(pipeline.lists, pipeline.flow, _costs(pipeline, spent, machine))
    ends = {rank: max((span.end_us for span in spans), default=0.0) for rank, spans in enumerate(timeline.ranks)}
    last = max(ends, key=lambda rank: ends[rank] + optimizer.get(rank, 0.0))
    own = [_times(ran, pipeline.times_of(key)) for key, ran in spent.items() if pipeline.place_of(key) == last]
    all_ = _sum(own)
    busy = sum(span.end_us - span.start_us for span in timeline.runs(last))
    return _Found(ends[last], all_, ends[last] - busy, optimizer.get(last, 0.0), timeline)


def _costs(pipeline: Pipeline, spent: Mapping[tuple[int, str], Ran], machine: Machine) -> Costs:
    """The times of the emitted graphs, in place of those by which the pipeline was cut."""
    start_us, bytes_per_us = machine.message_line(group_of(pipeline.mesh, PIPELINE, machine.ranks))
    times = dict.fromkeys(((place, "P" if kind == "C" else kind) for place, kind in spent), 0.0)
    for (place, kind), ran in spent.items():
        times[place, "P" if kind == "C" else kind] += ran.total
    return replace(pipeline.costs, times_us=times, latency_us=start_us, bytes_per_us=bytes_per_us)


def _times(ran: Ran, times: int) -> Ran:
    exposed = {axis: times * us for axis, us in ran.exposed.items()}
    return Ran(times * ran.total, times * ran.computed, exposed, times * ran.hosted, times * ran.calls)


def _sum(all_: list[Ran]) -> Ran:
    exposed: Counter[str] = Counter()
    for ran in all_:
        exposed.update(ran.exposed)
    return Ran(
        sum(ran.total for ran in all_), sum(ran.computed for ran in all_), dict(exposed),
        sum(ran.hosted for ran in all_), sum(ran.calls for ran in all_),
    )  # fmt: skip


def _states(compiled: Lowered) -> dict[int, float]:
    """The bytes that AdamW reads and writes on a rank, by its place on pp."""
    found = dict.fromkeys(range(dict(compiled.mesh.axes).get(PIPELINE, 1)), 0.0)
    owners, frozen = compiled.owners, compiled.plan.frozen
    for node, entry in compiled.program.parameters():
        if entry.name in frozen:
            continue
        known = record(node)
        part = TensorType(local_shape(known.type.shape, known.layout, compiled.program.mesh), known.type.dtype)
        found[owners[entry.name] or 0] += ADAMW * part.bytes_
    return found


def _flops(compiled: Lowered) -> tuple[float, float, str]:
    """(FLOPs of the model's own products, those that are computed again, the dtype of most of them)."""
    whole = products(dict(compiled.history).get("propagate", compiled.program))
    final = products(compiled.program)
    dtype = max(whole, key=lambda name: whole[name], default="float32")
    asked = float(sum(whole.values()))
    return asked, max(0.0, float(sum(final.values())) - asked), dtype


def products(program: Program) -> Counter[str]:
    """The FLOPs of the products of a program, by the dtype of their operands."""
    found: Counter[str] = Counter()
    for node in program.calls():
        if flops := record(node).flops:
            found[str(record(operand_nodes(node)[0]).type.dtype).removeprefix("torch.")] += flops
    return found


def tokens_of(program: Program) -> int:
    """The elements of the first integers of the batch; its rows if it has none."""
    batch = [record(node).type for node, entry in program.entries if entry.kind == "batch"]
    ids = next((type_ for type_ in batch if not type_.dtype.is_floating_point and len(type_.shape) > 1), None)
    if ids is not None:
        return ids.numel
    return next((type_.shape[0] for type_ in batch if type_.shape), 1)
