"""Simulate the instruction lists of a pipeline with the times of its emitted graphs on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of, local_bytes
from autopar.ir.ops.ops import COPIES, TO_HOST
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, TensorType
from autopar.ir.schedule import ONCE, Action, Timeline, Turn
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.passes.collectives.carried import sees_before
from autopar.passes.costs.node_costs import node_times
from autopar.passes.costs.streams import BACK, OUT, StreamTimes, run, run_pair
from autopar.passes.schedules.simulate import simulate


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """The slowest rank's time. end: of its last action; spent: what all of them take; bubble: its idle time before the
    last; optimizer: of its step."""

    end: float
    spent: StreamTimes
    bubble: float
    optimizer: float
    timeline: Timeline | None = None


def pipeline_time(
    pipeline: Pipeline, machine: Machine, optimizer: Mapping[int, float], rows: float = 1.0
) -> PipelineTime:
    """Run each graph on the machine, and then the lists with these times. optimizer: us of its step, by rank. rows: as
    of `node_times`."""
    emitted = emitted_costs(pipeline, machine, rows)
    timeline = simulate(pipeline.lists, pipeline.flow, emitted)
    ends = {rank: max((span.end_us for span in spans), default=0.0) for rank, spans in enumerate(timeline.ranks)}
    last = max(ends, key=lambda rank: ends[rank] + optimizer.get(rank, 0.0))
    spent = _sum(emitted.ran(span.instruction.turn) for span in timeline.runs(last))
    out, back = timeline.copied_us[last]
    spent = replace(spent, total=spent.total + out + back, exposed=_with_copies(spent.exposed, out, back))
    return PipelineTime(ends[last], spent, ends[last] - spent.total, optimizer.get(last, 0.0), timeline)


def _with_copies(exposed: Mapping[str, float], out: float, back: float) -> Mapping[str, float]:
    """What a rank waited for, with its copies that are instructions."""
    waited = {OUT: exposed.get(OUT, 0.0) + out, BACK: exposed.get(BACK, 0.0) + back}
    return {**exposed, **{way: us for way, us in waited.items() if us}}


@dataclass(frozen=True, slots=True)
class Emitted:
    """What the actions of a pipeline take on a machine: `Times` of the emitted graphs.

    graphs: by (stage, kind, length); pairs: of two that run side by side. links: us of the copies in each graph, out
    and back. growing: the part of each that grows with the place of a slice: attention to what lies before it. Its
    FLOPs are those of a slice in the middle of the sequence.
    """

    pipeline: Pipeline
    machine: Machine
    link: RankGroup
    graphs: Mapping[tuple[int, str, int], StreamTimes]
    growing: Mapping[tuple[int, str, int], float]
    links: Mapping[tuple[int, str, int], tuple[float, float]]
    pairs: Mapping[tuple[tuple[int, str, int], ...], StreamTimes]

    def time_us(self, turn: Turn) -> float:
        return self.ran(turn).total

    def transfer_us(self, types: tuple[TensorType, ...]) -> float:
        return self.machine.message_us(sum(type_.bytes_ for type_ in types), self.link)

    def copy_us(self, types: tuple[TensorType, ...]) -> float:
        return sum(self.machine.copy_us(type_.bytes_) for type_ in types)

    def link_us(self, turn: Turn) -> tuple[float, float]:
        links = [self.links[self.pipeline.graph_place(action)] for action in turn.actions]
        return sum(out for out, _ in links), sum(back for _, back in links)

    def ran(self, turn: Turn) -> StreamTimes:
        """A turn, with all graphs that it runs."""
        if isinstance(turn, Action):
            return self._ran(turn)
        return self.pairs[tuple(map(self.pipeline.graph_place, turn.actions))]

    def _ran(self, action: Action) -> StreamTimes:
        """An action, with all graphs that it runs: the prologue begins with the counts of every micro-batch."""
        key = self.pipeline.graph_place(action)
        more = (self._place(action) - 1) * self.growing.get(key, 0.0)
        own = self.graphs[key]
        own = replace(own, total=own.total + more, computed=own.computed + more)
        if action.kind != "P" or (action.stage, "C", 0) not in self.graphs:
            return own
        counts = (self._ran(Action(action.stage, "C", i)) for i in range(self.pipeline.microbatches))
        return _sum((*counts, own))

    def _place(self, action: Action) -> float:
        """How much more a slice sees before it, and in it, than one in the middle of the sequence."""
        flow = self.pipeline.flow
        if action.microbatch == ONCE or flow.slices == 1:
            return 1.0
        lengths = flow.lengths or (1,) * flow.slices
        at = action.microbatch % flow.slices
        return (2 * sum(lengths[:at]) + lengths[at]) / sum(lengths)


def emitted_costs(pipeline: Pipeline, machine: Machine, rows: float = 1.0) -> Emitted:
    """The times of the emitted graphs, in place of those by which the pipeline was cut for its own machine."""
    graphs = {one.place: _placed(one.program, pipeline.mesh) for one in pipeline.every_graph()}
    ran = {place: run(graph, machine, rows) for place, graph in graphs.items()}
    sliced = graphs if pipeline.flow.slices > 1 else {}
    growing = {place: _growing(graph, machine) for place, graph in sliced.items()}
    turns = {line.turn for lines in pipeline.lists for line in lines if line.beside is not None}
    both_of = {tuple(map(pipeline.graph_place, turn.actions)) for turn in turns}
    pairs = {both: run_pair(graphs[both[0]], graphs[both[1]], machine, rows) for both in both_of}
    links = {place: _links(graph, machine) for place, graph in graphs.items()}
    return Emitted(pipeline, machine, group_of(pipeline.mesh, PIPELINE, machine.ranks), ran, growing, links, pairs)


def _links(graph: Program, machine: Machine) -> tuple[float, float]:
    """us of the copies out of a graph, and back."""
    copies = [node for node in graph.calls() if node.target in COPIES]
    us = {node: machine.copy_us(local_bytes(node, graph.mesh)) for node in copies}
    out = sum(us[node] for node in copies if node.target is TO_HOST)
    return out, sum(us.values()) - out


def _placed(graph: Program, mesh: Mesh) -> Program:
    """A graph of a stage in the mesh of all stages: ranks of other stages may lie between its own."""
    return graph.with_(mesh=Mesh((*(pair for pair in graph.mesh.axes if pair[0] not in mesh), *mesh.axes)))


def _growing(graph: Program, machine: Machine) -> float:
    return sum(time for node, time in node_times(graph, machine).items() if sees_before(node))


def _sum(all_: Iterable[StreamTimes]) -> StreamTimes:
    total = computed = hosted = 0.0
    calls, exposed = 0, Counter[str]()
    for ran in all_:
        total, computed, hosted = total + ran.total, computed + ran.computed, hosted + ran.hosted
        calls += ran.calls
        exposed.update(ran.exposed)  # type: ignore[arg-type]  # of floats too
    return StreamTimes(total, computed, dict(exposed), hosted, calls)
