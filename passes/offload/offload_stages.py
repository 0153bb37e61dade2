"""offload_stages: what a stage of a pipeline keeps of a micro-batch waits in the host's memory until it goes back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.storage import root_of
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Input, Program, TensorType, record
from autopar.ir.schedule import Flow, Work
from autopar.passes.offload.choose_moves import Kept, choose, kept_by_none, why_not
from autopar.passes.offload.place_copies import CallLine, Moves, Ways, first_uses, host_name
from autopar.passes.offload.when_copied import goes_beside, stays

Key = tuple[int, str]
Graphs = Mapping[Key, Program]
BACK = "BIW"


def offload_stages(pipeline: Pipeline, program: Program, plan: Plan, between: Sequence[int]) -> Pipeline:
    """STAGED -> STAGED. What the backward graphs of a stage read of its forward graph waits in the host's memory, under
    another name. What other graphs read, or other ranks get, is as before.

    - What the layers of a graph hide is copied in it: both halves of a copy lie in one graph.
    - What they do not hide, in a stage of few layers, goes and comes by instructions of the schedule, OUT and IN,
      beside the turns of other micro-batches (`Flow.stores`, `Flow.loads`), if these are enough. With one or two turns
      between the passes it would be there all the same, and stays. Not so if `horizon` says how many layers ahead.

    program: the LOCAL program that was cut. between: of each stage, how many turns of its rank lie between the forward
    of a micro-batch and what goes back of it.
    """
    if not plan.offloads("activations") or not any(kind in BACK for _, kind in pipeline.graphs):
        return pipeline
    stages = [_Stage.of(pipeline.graphs, stage, plan, count) for stage, count in enumerate(between)]
    kept = _together(stages, program)
    chosen = choose(kept, plan.options)
    moves = [one.moving(chosen) for one in stages]
    notes = (*pipeline.notes, kept.note(chosen, plan.options), *_beside_note(stages, moves))
    pipeline = pipeline.with_(notes=notes)
    if not chosen:
        return pipeline

    def rewritten(graphs: Graphs) -> dict[Key, Program]:
        found, readers = dict(graphs), _readers(graphs)
        for stage, names in enumerate(moves):
            if names.all:
                found.update(_rewrite(graphs, stage, names, plan, readers))
        return found

    base = rewritten(pipeline.graphs)
    sized = {length: rewritten({**pipeline.graphs, **graphs}) for length, graphs in pipeline.sized.items()}
    sized = {length: {key: graphs[key] for key in pipeline.sized[length]} for length, graphs in sized.items()}
    costs = replace(pipeline.costs, host_bytes_per_us=plan.fixed.machine.to_host / 1e6)
    return pipeline.with_(graphs=base, sized=sized, flow=_flow(pipeline.flow, base, moves), costs=costs)


@dataclass(frozen=True, slots=True)
class _Moving:
    """The values of a stage that move, by their names as they were. out: those that go by an OUT. back: by the kind of
    a backward graph, those that come for it by an IN."""

    all: frozenset[str]
    out: frozenset[str]
    back: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage before it is rewritten. nodes: in its forward graph, of what its backward graphs read, by name. reasons:
    why each stays, if it does. out, back: as of `_Moving`, of all that could move."""

    stage: int
    nodes: Mapping[str, fx.Node]
    sizes: Mapping[str, int]
    reasons: Mapping[str, str]
    out: Collection[str]
    back: Mapping[str, Collection[str]]

    def key(self, name: str) -> str:
        return f"{self.stage} {name}"

    def moving(self, chosen: Collection[str]) -> _Moving:
        mine = frozenset(name for name in self.nodes if self.key(name) in chosen)
        back = {kind: mine.intersection(names) for kind, names in self.back.items()}
        return _Moving(mine, mine.intersection(self.out), back)

    @classmethod
    def of(cls, graphs: Graphs, stage: int, plan: Plan, between: int) -> _Stage:
        """between: turns of the rank between its passes; with none, what would be read again at once stays."""
        forward = CallLine(graphs[stage, "F"], ways_in(plan))
        made = _made(forward.program)
        read = _read_back(graphs, stage)
        nodes = {name: made[name] for name in read if name in made}
        shares = Counter(root_of(node) for node in {*made.values(), *(n for n in forward.program.results if n)})
        reasons = {name: why_not(forward, node) or _shared(node, shares) for name, node in nodes.items()}
        free = [name for name in nodes if not reasons[name]]
        ends = forward.ends_out([nodes[name] for name in free], forward.end)
        out = {name for name in free if ends[nodes[name]] == forward.end}
        back = _begins(graphs, stage, plan, set(free))
        comes = set().union(*back.values())
        is_open = plan.options.horizon == "auto"
        may_stay = free if is_open or not between else ()
        at_once = [name for name in may_stay if stays(between, name in out, name in comes)]
        reasons |= dict.fromkeys(at_once, "of what is read again at once")
        sizes = {name: local_bytes(node, forward.program.mesh) for name, node in nodes.items()}
        is_beside = is_open and goes_beside(between)
        return cls(stage, nodes, sizes, reasons, out if is_beside else (), back if is_beside else {})


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


def _begins(graphs: Graphs, stage: int, plan: Plan, names: Collection[str]) -> dict[str, set[str]]:
    """The values whose copies back would start where a backward graph begins, by the kind of that."""
    found = dict[str, set[str]]()
    for (place, kind), graph in graphs.items():
        if place != stage or kind not in BACK:
            continue
        line = CallLine(graph, ways_in(plan))
        coming = {node: entry.name for node, entry in graph.entries if entry.kind == "saved" and entry.name in names}
        begin = _first_call(line)
        starts = line.starts_back(first_uses(line, coming, 0), begin)
        found[kind] = {name for node, name in coming.items() if starts.get(node, begin) <= begin}
    return found


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


def _beside_note(stages: Sequence[_Stage], moves: Sequence[_Moving]) -> Iterator[str]:
    """What goes and comes by instructions of the schedule."""
    out = sum(one.sizes[name] for one, names in zip(stages, moves, strict=True) for name in names.out)
    back = sum(one.sizes[name] for one, names in zip(stages, moves, strict=True)
               for came in names.back.values() for name in came)  # fmt: skip
    if out or back:
        yield (
            f"offload: of each micro-batch {human(out)} go and {human(back)} come back beside the turns of others (OUT "
            f"and IN), since the layers of their stage are too few to hide them; horizon=1 keeps less on the device"
        )


def _readers(graphs: Graphs) -> dict[str, set[Key]]:
    """The graphs that are given each value of a micro-batch."""
    readers = defaultdict[str, set[Key]](set)
    for key, graph in graphs.items():
        for entry in graph.inputs:
            if entry.kind == "saved":
                readers[entry.name].add(key)
    return readers


def _rewrite(
    graphs: Graphs, stage: int, names: _Moving, plan: Plan, readers: Mapping[str, set[Key]]
) -> Iterator[tuple[Key, Program]]:
    """The graphs of a stage, with these values in the host's memory between them."""
    mine = {key for key in graphs if key[0] == stage and key[1] in BACK}
    leaving = names.all - names.out
    gone = {name for name in leaving if readers[name] <= mine}
    forward = CallLine(graphs[stage, "F"], ways_in(plan))
    made = {name: node for name, node in _made(forward.program).items() if name in leaving}
    ends = forward.ends_out(made.values(), forward.end)
    leaves = {host_name(name, stage): node for name, node in made.items()}
    yield (stage, "F"), Moves(forward, ends, {}, stage).run(leaves, gone)
    for key in mine:
        line = CallLine(graphs[key], ways_in(plan))
        back = names.back.get(key[1], ())
        coming = {node: entry.name for node, entry in line.program.entries
                  if entry.kind == "saved" and entry.name in names.all}  # fmt: skip
        if coming:
            loaded = [node for node, name in coming.items() if name not in back]
            starts = line.starts_back(first_uses(line, loaded, 0), _first_call(line))
            renamed = {name: back_name(name, key) for name in back}
            yield key, _renamed(Moves(line, {}, starts, stage).run(), renamed)


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    """A graph that is given saved values by other names."""
    inputs = [
        Input("saved", (names.get(one.name, one.name),)) if one.kind == "saved" else one for one in program.inputs
    ]
    return program.with_(inputs=tuple(inputs))


def back_name(name: str, key: Key) -> str:
    """The name of a value that came back for a backward graph by an IN."""
    return f"{name}_back{key[0]}{key[1]}"


def _flow(flow: Flow, graphs: Graphs, moves: Sequence[_Moving]) -> Flow:
    """The flow of rewritten graphs."""
    stores = {(stage, "F"): {host_name(name, stage): name for name in sorted(names.out)}
              for stage, names in enumerate(moves) if names.out}  # fmt: skip
    loads = {(stage, kind): {back_name(name, (stage, kind)): host_name(name, stage) for name in sorted(came)}
             for stage, names in enumerate(moves) for kind, came in names.back.items() if came}  # fmt: skip

    def saved(work: Work, graph: Program) -> Work:
        reads = tuple(entry.name for entry in graph.inputs if entry.kind == "saved")
        return replace(work, reads=reads, writes=tuple(out.name for out in graph.outputs if out.kind == "saved"))

    def named(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        hosts = {host_name(name, stage): types[name] for stage, names in enumerate(moves)
                 for name in names.all if name in types}  # fmt: skip
        comes = ((back, host) for loaded in loads.values() for back, host in loaded.items())
        return {**types, **hosts, **{back: hosts[host] for back, host in comes if host in hosts}}

    works = {key: saved(work, graphs[key]) if key[1] in "FBIW" else work for key, work in flow.works.items()}
    sized = {length: named(of) for length, of in flow.sized.items()}
    return replace(flow, works=works, types=named(flow.types), sized=sized, stores=stores, loads=loads)
