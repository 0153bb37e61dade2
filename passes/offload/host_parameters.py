"""host_parameters: parameters wait in the host's memory until a layer reads them, and gradients leave as they come."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.ops import AWAITED, TO_DEVICE, TO_HOST
from autopar.ir.ops.storage import is_view
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import CAST, HOST, PARTNER, Builder, Input, Program, Record, record, set_record
from autopar.passes.offload.place_copies import CallLine, Ways
from autopar.passes.offload.when_copied import BEHIND

MADE_BY = "host_parameters"
Key = tuple[int, str]
AHEAD = 1  # layers that a parameter comes before its use, as one that is gathered does


def host_parameters(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Parameters lie in the host's memory: a copy comes a layer ahead, for each pass anew, and their
    gradients leave as soon as they are there.

        offload: "parameters"
        LOCAL program
        %a: f32[8,8] [-,-] = parameter "layers.0.weight"
        %x: f32[4,8] [-,-] = batch "0"
        %einsum: f32[4,8] [-,-] = autopar.einsum.default(%x, %a, "ca,ba->cb")   # layers.0
        %sum_1: f32[] [] = aten.sum.default(%einsum)   # loss
        %einsum_1: f32[8,8] [-,-] = autopar.einsum.default(%einsum, %x, "cb,ca->ba")   # layers.0  backward
        return loss "loss" = %sum_1
        return gradient "layers.0.weight" = %einsum_1
    becomes
        LOCAL program
        %a: f32[8,8] [-,-] in host = parameter "layers.0.weight"
        %x: f32[4,8] [-,-] = batch "0"
        %a_load: f32[8,8] [-,-] = autopar.to_device_start.default(%a)
        %a_here: f32[8,8] [-,-] = autopar.wait.default(%a_load)
        %einsum: f32[4,8] [-,-] = autopar.einsum.default(%x, %a_here, "ca,ba->cb")   # layers.0
        %sum_1: f32[] [] = aten.sum.default(%einsum)
        %einsum_1: f32[8,8] [-,-] = autopar.einsum.default(%einsum, %x, "cb,ca->ba")   # layers.0  backward
        %einsum_1_out: f32[8,8] [-,-] in host = autopar.to_host_start.default(%einsum_1, True)
        %einsum_1_left: f32[8,8] [-,-] in host = autopar.wait.default(%einsum_1_out)
        return loss "loss" = %sum_1
        return gradient "layers.0.weight" = %einsum_1_left

    - Casts and views of a parameter are made of what came, once each time that it comes.
    - What the last layer reads in both passes comes once: no other layer reads a parameter between.
    - With ZeRO-3 it is a rank's part that comes, and that is gathered a layer ahead then.

    It stands behind `prefetch` and `bucket`: what comes, comes before the gather that reads it; what leaves has been
    summed. ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857.
    """
    if not plan.offloads("parameters"):
        return program
    return _HostParameters(program, plan, frozenset(), frozenset()).run()


def host_parameters_of_stages(pipeline: Pipeline, plan: Plan, beside: Collection[tuple[Key, Key]]) -> Pipeline:
    """STAGED -> STAGED. The same in each graph of a pipeline: what micro-batches add up to lies in the host's memory
    too, comes for each that adds to it, and leaves again.

    beside: the graphs that run side by side. What stages send to others, parameters or sums, stays on the device.
    """
    if not plan.offloads("parameters"):
        return pipeline
    totals, owners = _totals(pipeline, beside), pipeline.flow.owners

    def of(key: Key, graph: Program) -> Program:
        rank = pipeline.place_of(key)
        foreign = frozenset(name for name, ranks in owners.items() if rank not in ranks)
        return _HostParameters(graph, plan, totals, foreign).run()

    def moved(graphs: Mapping[Key, Program]) -> dict[Key, Program]:
        return {key: of(key, graph) for key, graph in graphs.items()}

    sized = {length: moved(graphs) for length, graphs in pipeline.sized.items()}
    return pipeline.with_(graphs=moved(pipeline.graphs), sized=sized)


def _totals(pipeline: Pipeline, beside: Collection[tuple[Key, Key]]) -> frozenset[str]:
    """The sums over micro-batches that are gradients of their rank's parameters and nothing else, no two of which are
    added to side by side."""
    makers, takers = defaultdict[str, list[Key]](list), defaultdict[str, list[Key]](list)
    mixed = set[str]()
    for key, graph in pipeline.graphs.items():
        leaving = [node for node, _ in graph.leaving]
        for node, out in graph.leaving:
            if out.kind == "part":
                makers[out.name].append(key)
                mixed |= {out.name} if leaving.count(node) > 1 or node in graph.placeholders else set()
        for node, entry in graph.entries:
            if entry.kind == "step":
                takers[entry.name].append(key)
                mixed |= set() if _gives_gradients(graph, node) else {entry.name}
    return frozenset(
        name
        for name, keys in makers.items()
        if name not in mixed and pipeline.reductions[name].is_sum(pipeline.time) and len(takers[name]) == 1
        if {pipeline.place_of(key) for key in keys} == {pipeline.place_of(takers[name][0])}
        if not any(set(pair) <= set(keys) for pair in beside)
    )


def _gives_gradients(graph: Program, node: fx.Node) -> bool:
    """True if a value leaves a graph as gradients alone."""
    made, pending = {node}, [node]
    while pending:
        new = [user for user in pending.pop().users if user not in made]
        made.update(new)
        pending += new
    return all(out.kind == "gradient" for result, out in graph.leaving if result in made)


@dataclass(eq=False, slots=True)
class _Stay:
    """One time that a parameter is on the device: from the first to the last call that reads it. value: what stands for
    it, and for casts and views of it, there."""

    parameter: fx.Node
    uses: list[fx.Node] = field(default_factory=list)
    load: fx.Node | None = None
    source: fx.Node | None = None
    value: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _HostParameters:
    """totals: the sums of micro-batches that lie in the host's memory. foreign: the names of placeholders that are
    parameters of other ranks, which come once a step."""

    def __init__(self, program: Program, plan: Plan, totals: Set[str], foreign: Set[str]) -> None:
        horizon = plan.options.horizon
        self.line = CallLine(program, Ways(horizon, plan.fixed.machine))
        self.ahead = AHEAD if horizon == "auto" else horizon
        self.program, self.build = program, Builder(MADE_BY)
        given = (node for node, entry in program.parameters() if not entry.name.startswith(PARTNER))
        self.own = {node: node for node in given if node.name not in foreign}
        self.first_alike: dict[fx.Node, fx.Node] = {}  # of casts and views: one is computed again as it was before
        known: dict[tuple[Any, str], fx.Node] = {}
        for node in program.calls():  # casts and views, by what they are of
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if source in self.own and (node.target is CAST or is_view(node)):
                self.own[node] = self.own[source]
                args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: self.first_alike.get(one, one))
                self.first_alike[node] = known.setdefault((node.target, str(args)), node)
        self.own |= {node: node for node, entry in program.entries if entry.kind == "step" and entry.name in totals}
        self.leaves = [out.kind == "gradient" or (out.kind == "part" and out.name in totals) for out in program.outputs]
        results = zip(program.leaving, self.leaves, strict=True)
        self.leaving = {node: out for (node, out), leaves in results if leaves and node is not None}
        self.stays: dict[tuple[fx.Node, fx.Node], _Stay] = {}  # by user and parameter
        self.begins: dict[int, list[_Stay]] = defaultdict(list)
        self.first = 1 + max((self.line.position[node] for node in program.placeholders), default=-1)
        stays = self._stays()
        users = {user for stay in stays for user in stay.uses}
        self.layers = self._layers(node for node in self.line.nodes if node in users)
        for stay in stays:
            self.begins[self._begin(stay)].append(stay)
        self.ends: dict[int, list[fx.Node]] = defaultdict(list)
        self.left: dict[fx.Node, fx.Node] = {}  # gradients -> what goes, and has gone
        self.before: dict[str, _Stay] = {}  # what earlier micro-batches add up to, by the name of the sum
        if plan.parts > 1:
            self._begin_sums()

    def run(self) -> Program:
        for place, node in enumerate(self.line.nodes):
            if place == self.first:
                self._place_sums()
            for gradient in self.ends.pop(place, ()):
                self._end(gradient)
            for stay in self.begins.get(place, ()):
                self._load(stay)
            if node.op == "output":
                self._output(node)
            elif node.op == "placeholder" and node in self.own:
                self.build.copy(node, like=record(node).with_(tier=HOST))
            elif node not in self.own:
                self.build.copy(node, partial(self._read, user=node))
            if node in self.leaving and node not in self.own:
                self._leave(node, place)
        inputs = (*self.program.inputs, *(Input("part", (name,)) for name in self.before))
        return self.program.with_(graph=self.build.graph, inputs=inputs)

    def _begin_sums(self) -> None:
        """Let what earlier micro-batches add up to come before what is added to it."""
        for node, out in self.leaving.items():
            if out.kind == "part":
                stay = self.before[out.name] = _Stay(node, [node])
                self.begins[self._begin(stay)].append(stay)

    def _place_sums(self) -> None:
        for name, stay in self.before.items():
            made = self.build.graph.placeholder(f"{name}_before")
            set_record(made, _like(record(stay.parameter), stay.uses[0]).with_(operands=(), tier=HOST))
            stay.source = made

    def _stays(self) -> list[_Stay]:
        """All of them, of each parameter in the order of its uses: one for each layer and pass that reads it, but for
        what is read again before another layer is."""
        found, users = list[_Stay](), defaultdict[fx.Node, list[fx.Node]](list)
        for node in self.line.nodes:
            if node not in self.own:
                results = zip(self.program.results, self.leaves, strict=True)
                read = [one for one, leaves in results if not leaves] if node.op == "output" else node.all_input_nodes
                for parameter in dict.fromkeys(self.own[one] for one in read if one in self.own):
                    users[parameter].append(node)
        readers = sorted({user for reading in users.values() for user in reading}, key=self.line.position.__getitem__)
        for parameter, reading in users.items():
            last: _Stay | None = None
            known: dict[tuple[bool, str], _Stay] = {}
            for user in reading:
                key = self._layer(user)
                stay = known.get(key)
                if stay is None and last is not None and not self._reads_between(readers, last.uses[-1], user):
                    stay = last
                if stay is None:
                    stay = _Stay(parameter)
                    found.append(stay)
                last = known[key] = stay
                stay.uses.append(user)
                self.stays[user, parameter] = stay
        return found

    def _reads_between(self, readers: Sequence[fx.Node], before: fx.Node, user: fx.Node) -> bool:
        """True if another layer reads a parameter between two calls."""
        between = (
            node for node in readers if self.line.position[before] < self.line.position[node] < self.line.position[user]
        )
        own = {unit_of(record(node).module) for node in (before, user)}
        return any(unit_of(record(node).module) not in own for node in between)

    def _layers(self, users: Iterable[fx.Node]) -> list[int]:
        """The places where layers begin in a pass: their first calls that read a parameter, or of those that only give
        gradients the first ones. What is computed again of a layer for another one does not begin it."""
        giving = {self._layer(node) for node in self.leaving}
        first: dict[tuple[bool, str], int] = {}
        for node in (*users, *(node for node in self.line.nodes if self._layer(node) in giving)):
            first.setdefault(self._layer(node), self.line.position[node])
        return sorted(first.values())

    def _layer(self, node: fx.Node) -> tuple[bool, str]:
        return self.line.position[node] >= self.line.begins_back, unit_of(record(node).module)

    def _begin(self, stay: _Stay) -> int:
        """The place where a copy starts: some layers ahead of its first use, in the same pass."""
        use = self.line.position[stay.uses[0]]
        begin = max(self.first, self.line.begins_back) if use >= self.line.begins_back else self.first
        begun = [place for place in self.layers if begin <= place <= use]
        return begun[-1 - self.ahead] if len(begun) > self.ahead else min(use, begin)

    def _load(self, stay: _Stay) -> None:
        parameter = stay.parameter
        like = _like(record(parameter), stay.uses[0], reason="parameters wait in the host's memory")
        source = stay.source or self.build.value[parameter]
        stay.load = self.build.call(TO_DEVICE, source, like=like, name=f"{parameter.name}_load")

    def _read(self, old: fx.Node, user: fx.Node) -> fx.Node:
        """What a call reads in place of an old operand."""
        return self._here(old, self.stays[user, self.own[old]]) if old in self.own else self.build.value[old]

    def _here(self, old: fx.Node, stay: _Stay) -> fx.Node:
        """A parameter, or a cast or view of it, on the device: made once for as long as it stays."""
        old = self.first_alike.get(old, old)
        if old not in stay.value:
            if old is stay.parameter:
                like = _like(record(old), stay.uses[0])
                made = self.build.call(AWAITED, stay.load, like=like, name=f"{old.name}_here")
            else:
                args, kwargs = fx.node.map_arg((old.args, dict(old.kwargs)), lambda one: self._here(one, stay))
                like = record(old).with_(phase=record(stay.uses[0]).phase)
                made = self.build.call(old.target, *args, like=like, name=old.name, **kwargs)  # type: ignore[arg-type]
            stay.value[old] = made
        return stay.value[old]

    def _leave(self, gradient: fx.Node, place: int) -> None:
        """Start to copy a gradient out; it is awaited a layer later."""
        known, stay = record(gradient), self.before.get(self.leaving[gradient].name)
        before = [] if stay is None else [self._here(gradient, stay)]
        like = known.with_(origin="", operands=known.layouts * (1 + len(before)), flops=0, tier=HOST,
                           reason="gradients wait in the host's memory")  # fmt: skip
        made = self.build.value[gradient]
        self.left[gradient] = self.build.call(TO_HOST, made, True, *before, like=like, name=f"{gradient.name}_out")
        later = self.layers[bisect_right(self.layers, place) :]
        self.ends[later[BEHIND] if len(later) > BEHIND else self.line.end].append(gradient)

    def _end(self, gradient: fx.Node) -> None:
        started = self.left[gradient]
        like = record(started).with_(reason="", operands=record(started).layouts)
        self.left[gradient] = self.build.call(AWAITED, started, like=like, name=f"{gradient.name}_left")

    def _output(self, node: fx.Node) -> None:
        results = list[Any]()
        for result, leaves in zip(self.program.results, self.leaves, strict=True):
            if leaves and result is not None and (result in self.left or result.op == "placeholder"):
                results.append(self.left.get(result) or self.build.value[result])  # a sum that is a gradient is there
            else:
                results.append(result and self._read(result, node))
        made = self.build.graph.output(tuple(results))
        set_record(made, record(node))


def _like(known: Record, user: fx.Node, reason: str = "") -> Record:
    """The record of a parameter that comes for a call."""
    where = record(user)
    return known.with_(
        origin="", operands=known.layouts, flops=0, reason=reason, phase=where.phase, module=where.module
    )
