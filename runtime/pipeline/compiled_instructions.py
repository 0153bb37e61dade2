"""A rank's instruction list, compiled: for each instruction the values that it reads, waits for, writes and frees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.ir.pipeline import Graph, Pipeline
from autopar.ir.program import Program
from autopar.ir.schedule import IN, ONCE, Action, Instruction, copies_ended
from autopar.runtime.executor.executor import CPU, Executable, Kernels, Study
from autopar.runtime.executor.inputs import Key
from autopar.runtime.executor.kernel_table import adding_variant
from autopar.runtime.executor.owned import owned
from autopar.runtime.pipeline.arrivals import arrivals
from autopar.runtime.pipeline.microbatches import ExecutorGraph, StageGraph

# Where a result goes: to the values; to what the micro-batches add up to, as a part of it or already with those
# before; or out of the step.
VALUE, PART, TOTAL, FINAL = "value", "part", "total", "final"
Place = tuple[int, str, int]  # of a graph: stage or rank, kind, length of its slices as in `Graph`
_PLACES: Mapping[str, str] = {"saved": VALUE, "step": VALUE, "part": PART}


@dataclass(frozen=True, slots=True)
class Write:
    """Where a result goes. key: the value, or the part of a sum. kind: of what leaves the step."""

    place: str
    key: Key
    kind: str


@dataclass(frozen=True, slots=True)
class Count:
    """What the prologue needs of the whole batch: a graph for each micro-batch, and what that reads."""

    executables: tuple[Executable, ...]
    reads: tuple[tuple[Key, ...], ...]
    writes: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class GraphRun:
    """The run of an action's graph. reads: of its placeholders, with True if the value dies in it. writes: of its
    results. The sums that it adds to by itself are the graph's."""

    action: Action
    graph: StageGraph
    reads: tuple[tuple[Key, bool], ...]
    writes: tuple[Write, ...]
    count: Count | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """An instruction, ready to run.

    runs: of a turn, one or two that go side by side. reads: of what is sent, or received; with True if the value dies
    here; of an OUT or an IN what is copied. makes: the values of the copies. awaits: the places of the receives and
    copies back that it is the first to need. ends: those of the copies out that have ended behind it, or of an IN
    before it. totals: the sums that are whole and are read for the first time. frees: what else dies here.
    """

    instruction: Instruction
    runs: tuple[GraphRun, ...] = ()
    reads: tuple[tuple[Key, bool], ...] = ()
    awaits: tuple[int, ...] = ()
    totals: tuple[str, ...] = ()
    frees: tuple[Key, ...] = ()
    makes: tuple[Key, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def keys(self) -> list[Key]:
        """All that it reads."""
        return [key for reads in (self.reads, *(run.reads for run in self.runs)) for key, _ in reads]


@dataclass(frozen=True)
class RankCode:
    """What one rank of a pipeline runs; the same for all ranks with its coordinate on "pp". arrived: by the place of a
    RECV the SENDs that have left when it is there."""

    pipeline: Pipeline
    graphs: Mapping[Place, StageGraph]
    lines: tuple[Line, ...]
    arrived: Mapping[int, tuple[Instruction, ...]]


def compile_rank(
    pipeline: Pipeline, rank: int, study: Study | None = None, device: torch.device = CPU,
    kernels: Kernels | None = None,
) -> RankCode:  # fmt: skip
    """The graphs of a rank, each turned into Python once, and the lines of its list. device: where its tensors lie.
    kernels: of its groups."""
    graphs = graphs_at(pipeline, rank)
    return code_of(pipeline, rank, {one.place: on_executor(pipeline, one, study, device, kernels) for one in graphs})


def graphs_at(pipeline: Pipeline, rank: int) -> list[Graph]:
    """The graphs that a rank of the pipeline runs."""
    return [one for one in pipeline.every_graph() if pipeline.place_of(one.key) == rank]


def on_executor(
    pipeline: Pipeline, one: Graph, study: Study | None = None, device: torch.device = CPU,
    kernels: Kernels | None = None,
) -> ExecutorGraph:  # fmt: skip
    """A graph of a pipeline on our executor."""
    sums, own = sums_of(one.program, pipeline), owned(pipeline, one)
    begun = [entry.name for entry in one.program.inputs if entry.kind == "part"]
    executable = Executable(one.program.graph, sums.values(), own, device, study, kernels)
    return ExecutorGraph(executable, (*begun, *sums))


def code_of(pipeline: Pipeline, rank: int, graphs: Mapping[Place, StageGraph]) -> RankCode:
    """The list of a rank, over its graphs. Those of kind C are on our executor."""
    steps = pipeline.flow.step_values()
    lines = [_line(pipeline, graphs, steps, instruction) for instruction in pipeline.lists[rank]]
    ends = defaultdict[int, list[int]](list)
    for place, end in copies_ended(pipeline.lists[rank], pipeline.flow).items():
        ends[end].append(place)
    lines = [replace(line, ends=tuple(ends[i])) for i, line in enumerate(lines)]
    return RankCode(pipeline, graphs, _with_waits(lines), arrivals(pipeline.lists, pipeline.flow, rank))


def sums_of(program: Program, pipeline: Pipeline) -> dict[str, fx.Node]:
    """The calls that can add to the sum over the micro-batches by themselves, by the name of the sum."""
    results = program.leaving
    return {
        out.name: node
        for node, out in results
        if out.kind == "part" and pipeline.reductions[out.name].is_sum(pipeline.time) and node is not None
        if adding_variant(node.target) is not None and len(node.users) == 1 and program.results.count(node) == 1
    }


def _line(
    pipeline: Pipeline, graphs: Mapping[Place, StageGraph], steps: frozenset[str], instruction: Instruction
) -> Line:
    def keys_of(names: Iterable[str], action: Action) -> tuple[Key, ...]:
        return tuple((name, ONCE if name in steps else action.microbatch) for name in names)

    # What dies with a copy lives until that has ended.
    if instruction.is_copy:
        copies = pipeline.flow.copies(instruction)
        frees = set(keys_of(instruction.frees, instruction.action))
        sources = keys_of(map(copies.__getitem__, instruction.values), instruction.action)
        makes = keys_of(instruction.values, instruction.action)
        reads = tuple((key, key in frees) for key in sources)
        return Line(instruction, reads=reads, frees=tuple(sorted(frees - set(sources))), makes=makes)
    # A message reads what it sends; what dies with a SEND is freed when the message has left.
    if instruction.op != "RUN":
        frees = set(keys_of(instruction.frees, instruction.action))
        dying = frees if instruction.op == "SEND" else set()
        reads = tuple((key, key in dying) for key in keys_of(instruction.values, instruction.action))
        return Line(instruction, reads=reads, frees=tuple(sorted(frees - dying)))
    frees = {key for run in instruction.runs for key in keys_of(run.frees, run.action)}
    inputs = [_inputs(pipeline.graph(run.action), run.action.microbatch) for run in instruction.runs]
    readers = Counter(key for keys in inputs for key in set(keys))
    dying = {key for key in frees if readers[key] == 1}  # what both of a pair read dies behind them
    runs = tuple(
        _graph_run(pipeline, graphs, run.action, tuple((key, key in dying) for key in keys))
        for run, keys in zip(instruction.runs, inputs, strict=True)
    )
    return Line(instruction, runs, frees=tuple(sorted(frees - dying)))


def _graph_run(
    pipeline: Pipeline, graphs: Mapping[Place, StageGraph], action: Action, reads: tuple[tuple[Key, bool], ...]
) -> GraphRun:
    graph = graphs[pipeline.graph_place(action)]
    writes = tuple(_write(out.kind, out.name, action, graph.sums) for out in pipeline.graph(action).outputs)
    # P begins by counting: the graph C of each micro-batch, side by side, whose sums (tokens, say) P reads.
    count = None
    if action.kind == "P" and (action.stage, "C") in pipeline.graphs:
        counts = [Action(action.stage, "C", microbatch) for microbatch in range(pipeline.microbatches)]
        counting = pipeline.graphs[action.stage, "C"]
        count = Count(
            tuple(_executable(graphs[pipeline.graph_place(each)]) for each in counts),
            tuple(_inputs(counting, each.microbatch) for each in counts),
            tuple((out.name, ONCE) for out in counting.outputs),
        )
    return GraphRun(action, graph, reads, writes, count)


def _executable(graph: StageGraph) -> Executable:
    assert isinstance(graph, ExecutorGraph), "what counts for the whole batch is on our executor"
    return graph.executable


def _inputs(program: Program, microbatch: int) -> tuple[Key, ...]:
    """The values of a graph's placeholders. What is not split is the same in all micro-batches; sums begun by others
    stand last, and are the graph's own affair."""
    inputs: list[Key] = []
    for node, entry in program.entries:
        if entry.kind == "part":
            continue
        if entry.kind == "saved":
            inputs.append((entry.name, microbatch))
        elif entry.kind == "batch":
            inputs.append((node.name, max(microbatch, 0)))
        else:
            inputs.append((entry.name if entry.kind == "step" else node.name, ONCE))
    return tuple(inputs)


def _write(kind: str, name: str, action: Action, sums: tuple[str, ...]) -> Write:
    place = TOTAL if kind == "part" and name in sums else _PLACES.get(kind, FINAL)
    return Write(place, (name, action.microbatch if kind in ("saved", "part") else ONCE), kind)


def _with_waits(lines: list[Line]) -> tuple[Line, ...]:
    """With what each line is the first to need: what was received, and what the micro-batches add up to."""
    coming: dict[Key, int] = {}
    writes = (write for line in lines for run in line.runs for write in run.writes)
    parts = {write.key[0] for write in writes if write.place in (PART, TOTAL)}
    found = []
    for place, line in enumerate(lines):
        keys = line.keys
        if line.instruction.op in ("RECV", IN):
            coming.update(dict.fromkeys(line.makes or keys, place))
            found.append(line)
            continue
        awaits = sorted({coming[key] for key in keys if key in coming})
        coming = {key: receive for key, receive in coming.items() if receive not in awaits}
        totals = dict.fromkeys(name for name, microbatch in keys if microbatch == ONCE and name in parts)
        parts.difference_update(totals)
        found.append(replace(line, awaits=tuple(awaits), totals=tuple(totals)))
    return tuple(found)
