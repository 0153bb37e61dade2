"""A rank's instruction list, compiled: for each instruction the values that it reads, waits for, writes and frees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.ir.pipeline import Graph, Pipeline
from autopar.ir.program import Program
from autopar.ir.schedule import ONCE, Action, Instruction
from autopar.runtime.executor.executor import CPU, Executable, Kernels, Study
from autopar.runtime.executor.inputs import Key
from autopar.runtime.executor.kernel_table import adding_variant
from autopar.runtime.executor.owned import owned
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
class Line:
    """An instruction, ready to run.

    reads: of the graph's placeholders, or of what is sent, or received; with True if the value dies here. sums: what
    the graph adds to by itself. awaits: the places of the receives that it is the first to need. totals: the sums that
    are whole and are read for the first time. frees: what else dies here.
    """

    instruction: Instruction
    graph: StageGraph | None = None
    reads: tuple[tuple[Key, bool], ...] = ()
    sums: tuple[str, ...] = ()
    writes: tuple[Write, ...] = ()
    awaits: tuple[int, ...] = ()
    totals: tuple[str, ...] = ()
    frees: tuple[Key, ...] = ()
    count: Count | None = None


@dataclass(frozen=True)
class RankCode:
    """What one rank of a pipeline runs; the same for all ranks with its coordinate on "pp"."""

    pipeline: Pipeline
    graphs: Mapping[Place, StageGraph]
    lines: tuple[Line, ...]


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
    return ExecutorGraph(Executable(one.program.graph, sums.values(), own, device, study, kernels), tuple(sums))


def code_of(pipeline: Pipeline, rank: int, graphs: Mapping[Place, StageGraph]) -> RankCode:
    """The list of a rank, over its graphs. Those of kind C are on our executor."""
    steps = pipeline.flow.step_values()
    lines = [_line(pipeline, graphs, steps, instruction) for instruction in pipeline.lists[rank]]
    return RankCode(pipeline, graphs, _with_waits(lines))


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
    action = instruction.action

    def key(name: str) -> Key:
        return name, ONCE if name in steps else action.microbatch

    frees = {key(name) for name in instruction.frees}
    # A message reads what it sends; what dies with a SEND is freed when the message has left.
    if instruction.op != "RUN":
        keys = tuple(key(name) for name in instruction.values)
        dying = frees if instruction.op == "SEND" else set()
        return Line(instruction, reads=tuple((k, k in dying) for k in keys), frees=tuple(sorted(frees - dying)))
    program = pipeline.graph(action)
    keys = _inputs(program, action.microbatch)
    graph = graphs[_place(pipeline, action)]
    writes = tuple(_write(out.kind, out.name, action, graph.sums) for out in program.outputs)
    # P begins by counting: the graph C of each micro-batch, side by side, whose sums (tokens, say) P reads.
    count = None
    if action.kind == "P" and (action.stage, "C") in pipeline.graphs:
        counts = [Action(action.stage, "C", microbatch) for microbatch in range(pipeline.microbatches)]
        counting = pipeline.graphs[action.stage, "C"]
        count = Count(
            tuple(_executable(graphs[_place(pipeline, each)]) for each in counts),
            tuple(_inputs(counting, each.microbatch) for each in counts),
            tuple((out.name, ONCE) for out in counting.outputs),
        )
    return Line(
        instruction,
        graph,
        tuple((k, k in frees) for k in keys),
        graph.sums,
        writes,
        frees=tuple(sorted(frees.difference(keys))),
        count=count,
    )


def _place(pipeline: Pipeline, action: Action) -> Place:
    """The graph that an action runs."""
    return action.stage, action.kind, pipeline.length_of(action)


def _executable(graph: StageGraph) -> Executable:
    assert isinstance(graph, ExecutorGraph), "what counts for the whole batch is on our executor"
    return graph.executable


def _inputs(program: Program, microbatch: int) -> tuple[Key, ...]:
    """The values of a graph's placeholders. What is not split is the same in all micro-batches."""
    inputs: list[Key] = []
    for node, entry in program.entries:
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
    parts = {write.key[0] for line in lines for write in line.writes if write.place in (PART, TOTAL)}
    found = []
    for place, line in enumerate(lines):
        keys = [key for key, _ in line.reads]
        if line.instruction.op == "RECV":
            coming.update(dict.fromkeys(keys, place))
            found.append(line)
            continue
        awaits = sorted({coming[key] for key in keys if key in coming})
        coming = {key: receive for key, receive in coming.items() if receive not in awaits}
        totals = [name for name, microbatch in keys if microbatch == ONCE and name in parts]
        parts.difference_update(totals)
        found.append(replace(line, awaits=tuple(awaits), totals=tuple(totals)))
    return tuple(found)
