"""offload_stages: what a stage of a pipeline keeps of a micro-batch waits in the host's memory until it goes back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.storage import root_of
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program, TensorType, record
from autopar.ir.schedule import Flow, Work
from autopar.passes.offload.choose_moves import Kept, choose, kept_by_none, why_not
from autopar.passes.offload.place_copies import CallLine, Moves, Ways, first_uses, host_name

Key = tuple[int, str]
Graphs = Mapping[Key, Program]
BACK = "BIW"


def offload_stages(pipeline: Pipeline, program: Program, plan: Plan, in_flight: Sequence[int]) -> Pipeline:
    """STAGED -> STAGED. Forward graphs leave what the backward graphs of their stage read in the host's memory, under
    another name, and both halves of a copy lie in one graph. What other graphs read, or other ranks get, is as before.

    program: the LOCAL program that was cut. in_flight: of each stage, how many micro-batches it holds at once.
    """
    if not plan.offloads("activations") or not any(kind in BACK for _, kind in pipeline.graphs):
        return pipeline
    stages = [_Stage.of(pipeline.graphs, stage, plan, count > 1) for stage, count in enumerate(in_flight)]
    kept = _together(stages, program)
    chosen = choose(kept, plan.options)
    by_stage = [{name for name in one.nodes if one.key(name) in chosen} for one in stages]
    pipeline = pipeline.with_(notes=(*pipeline.notes, kept.note(chosen, plan.options)))
    if not chosen:
        return pipeline

    def rewritten(graphs: Graphs) -> dict[Key, Program]:
        found, readers = dict(graphs), _readers(graphs)
        for stage, names in enumerate(by_stage):
            if names:
                found.update(_rewrite(graphs, stage, names, plan, readers))
        return found

    base = rewritten(pipeline.graphs)
    sized = {length: rewritten({**pipeline.graphs, **graphs}) for length, graphs in pipeline.sized.items()}
    sized = {length: {key: graphs[key] for key in pipeline.sized[length]} for length, graphs in sized.items()}
    return pipeline.with_(graphs=base, sized=sized, flow=_flow(pipeline.flow, base, by_stage))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage before it is rewritten. nodes: in its forward graph, of what its backward graphs read, by name. reasons:
    why each stays, if it does."""

    stage: int
    nodes: Mapping[str, fx.Node]
    sizes: Mapping[str, int]
    reasons: Mapping[str, str]

    def key(self, name: str) -> str:
        return f"{self.stage} {name}"

    @classmethod
    def of(cls, graphs: Graphs, stage: int, plan: Plan, is_held: bool) -> _Stage:
        """is_held: other micro-batches come before this one goes back, so that nothing is read again at once."""
        forward = CallLine(graphs[stage, "F"], ways_in(plan))
        made = _made(forward.program)
        read = _read_back(graphs, stage)
        nodes = {name: made[name] for name in read if name in made}
        shares = Counter(root_of(node) for node in {*made.values(), *(n for n in forward.program.results if n)})
        reasons = {name: why_not(forward, node) or _shared(node, shares) for name, node in nodes.items()}
        if not is_held:
            ends = forward.ends_out([nodes[name] for name in nodes if not reasons[name]], forward.end)
            begins = _begins(graphs, stage, plan, {name for name in nodes if not reasons[name]})
            for name in begins:
                reasons[name] = "of what is read again at once" if ends[nodes[name]] == forward.end else ""
        sizes = {name: local_bytes(node, forward.program.mesh) for name, node in nodes.items()}
        return cls(stage, nodes, sizes, reasons)


def ways_in(plan: Plan) -> Ways:
    """How copies are placed in a graph of a stage."""
    return Ways(plan.options.horizon, plan.fixed.machine)


def _made(graph: Program) -> dict[str, fx.Node]:
    """What is there after a forward graph, by name: what it made, and what it was given by other actions."""
    given = {entry.name: node for node, entry in graph.entries if entry.kind == "saved"}
    return given | {out.name: node for node, out in graph.leaving if out.kind == "saved" and node is not None}


def _read_back(graphs: Graphs, stage: int) -> list[str]:
    """The values of a micro-batch that the backward graphs of a stage are given."""
    backward = [graphs[key] for key in graphs if key[0] == stage and key[1] in BACK]
    return list(dict.fromkeys(entry.name for graph in backward for entry in graph.inputs if entry.kind == "saved"))


def _shared(node: fx.Node, shares: Mapping[fx.Node, int]) -> str:
    root = root_of(node)
    is_alone = shares[root] == 1 and (root.op == "call_function" or root is node)
    return "" if is_alone else "of shared memory"


def _begins(graphs: Graphs, stage: int, plan: Plan, names: Collection[str]) -> Iterator[str]:
    """The values whose copies back would start where a backward graph begins."""
    for (place, kind), graph in graphs.items():
        if place != stage or kind not in BACK:
            continue
        line = CallLine(graph, ways_in(plan))
        coming = {node: entry.name for node, entry in graph.entries if entry.kind == "saved" and entry.name in names}
        begin = _first_call(line)
        starts = line.starts_back(first_uses(line, coming, 0), begin)
        yield from (name for node, name in coming.items() if starts.get(node, begin) <= begin)


def _first_call(line: CallLine) -> int:
    return next(i for i, node in enumerate(line.nodes) if node.op != "placeholder")


def _together(stages: Sequence[_Stage], program: Program) -> Kept:
    movable, others, units = dict[str, int](), Counter[str](), dict[str, str]()
    for one in stages:
        for name, why in one.reasons.items():
            if why:
                others[why] += one.sizes[name]
            else:
                movable[one.key(name)] = one.sizes[name]
                units[one.key(name)] = unit_of(record(one.nodes[name]).module)
    return Kept(movable, others, kept_by_none(program), units)


def _readers(graphs: Graphs) -> dict[str, set[Key]]:
    """The graphs that are given each value of a micro-batch."""
    readers = defaultdict[str, set[Key]](set)
    for key, graph in graphs.items():
        for entry in graph.inputs:
            if entry.kind == "saved":
                readers[entry.name].add(key)
    return readers


def _rewrite(
    graphs: Graphs, stage: int, names: Collection[str], plan: Plan, readers: Mapping[str, set[Key]]
) -> Iterator[tuple[Key, Program]]:
    """The graphs of a stage, with these values in the host's memory between them."""
    mine = {key for key in graphs if key[0] == stage and key[1] in BACK}
    gone = {name for name in names if readers[name] <= mine}
    forward = CallLine(graphs[stage, "F"], ways_in(plan))
    made = {name: node for name, node in _made(forward.program).items() if name in names}
    ends = forward.ends_out(made.values(), forward.end)
    leaves = {host_name(name, stage): node for name, node in made.items()}
    yield (stage, "F"), Moves(forward, ends, {}, stage).run(leaves, gone)
    for key in mine:
        line = CallLine(graphs[key], ways_in(plan))
        coming = [node for node, entry in line.program.entries if entry.kind == "saved" and entry.name in names]
        if coming:
            starts = line.starts_back(first_uses(line, coming, 0), _first_call(line))
            yield key, Moves(line, {}, starts, stage).run()


def _flow(flow: Flow, graphs: Graphs, by_stage: Sequence[Collection[str]]) -> Flow:
    """The flow of rewritten graphs. by_stage: the values that moved, as they were."""

    def saved(work: Work, graph: Program) -> Work:
        reads = tuple(entry.name for entry in graph.inputs if entry.kind == "saved")
        return replace(work, reads=reads, writes=tuple(out.name for out in graph.outputs if out.kind == "saved"))

    def named(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        moved = [(stage, name) for stage, names in enumerate(by_stage) for name in names if name in types]
        return {**types, **{host_name(name, stage): types[name] for stage, name in moved}}

    works = {key: saved(work, graphs[key]) if key[1] in "FBIW" else work for key, work in flow.works.items()}
    return replace(flow, works=works, types=named(flow.types), sized={n: named(of) for n, of in flow.sized.items()})
