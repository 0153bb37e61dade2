"""Which placeholders of a pipeline's graphs may be written over: memory that nobody looks at after the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import fx

from autopar.ir.pipeline import Graph, Pipeline
from autopar.ir.schedule import Instruction
from autopar.runtime.executor.lifetime import is_dense, lifetimes


def owned(pipeline: Pipeline, one: Graph) -> frozenset[fx.Node]:
    """The placeholders over which a graph on our executor may write, where the graphs that it reads from are on it too.

    An epilogue may write over sums of several micro-batches. Any graph may write over what another one of its rank
    saved for the same micro-batch, if that lies in memory of its own and this graph is the last that reads it. What
    goes to other ranks or comes from them may be on its way still; slices keep values for one another.
    """
    lists = pipeline.lists[pipeline.place_of(one.key)]
    moved = {name for line in lists if line.op != "RUN" for name in line.values}
    read = {node: entry for node, entry in one.program.entries if entry.name not in moved}
    if one.key[1] == "E":
        sums = {name for name, how in pipeline.reductions.items() if how.is_sum(pipeline.time)}
        own = {node for node, entry in read.items() if entry.kind == "step" and entry.name in sums}
        return frozenset(own) if pipeline.microbatches > 1 else frozenset()
    if pipeline.flow.slices > 1:
        return frozenset()
    saved = {node: entry.name for node, entry in read.items() if entry.kind == "saved"}
    free = _own_values(pipeline, one, set(saved.values())) & _dying(pipeline, one)
    return frozenset(node for node, name in saved.items() if name in free)


def _dying(pipeline: Pipeline, one: Graph) -> set[str]:
    """The values that die each time when a graph has run."""
    lines = pipeline.lists[pipeline.place_of(one.key)]
    runs = [_alone(run, line, pipeline) for line in lines for run in line.runs]
    frees = [set(run.frees) for run in runs if (run.action.stage, run.action.kind) == one.key]
    return set.intersection(*frees) if frees else set()


def _alone(run: Instruction, line: Instruction, pipeline: Pipeline) -> Instruction:
    """A run of a line, which frees what the run beside it does not read."""
    read = {key for one in line.runs if one.action != run.action for key in pipeline.flow.reads_of(one.action)}
    return replace(run, frees=tuple(name for name in run.frees if (name, run.action.microbatch) not in read))


def _own_values(pipeline: Pipeline, one: Graph, names: set[str]) -> set[str]:
    """Find the saved values that lie in memory of their own, each made by one graph of the same rank."""
    rank, found, lost = pipeline.place_of(one.key), set[str](), set[str]()
    for key, program in pipeline.graphs.items():
        if pipeline.place_of(key) == rank and any(out.name in names for out in program.outputs):
            own = own_results(program.graph)
            for node, out in program.leaving:
                (found if node in own and out.name not in found else lost).add(out.name)
    return found - lost


def own_results(graph: fx.Graph) -> frozenset[fx.Node]:
    """The results of a graph that lie in memory of their own, each element once: neither in that of an input nor in
    that of another result."""
    lives = lifetimes(graph)
    results: list[fx.Node] = [node for node in graph.output_node().args[0] if node is not None]  # type: ignore
    shares = Counter(lives.share[node] for node in results)
    alone = (node for node in results if shares[lives.share[node]] == 1 and lives.share[node] not in lives.foreign)
    return frozenset(node for node in alone if is_dense(node))
