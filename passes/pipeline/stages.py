"""stages: a LOCAL program becomes the graphs of a pipeline's actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of, local_bytes, local_type
from autopar.ir.ops.storage import is_view
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import AS_PARAMETER, CAST, Program, TensorType, record
from autopar.ir.schedule import Costs, Flow, Work
from autopar.passes.collectives.carried import sees_before
from autopar.passes.costs.node_costs import node_times
from autopar.passes.pipeline.cuts.action_graphs import (
    FromOutside,
    Key,
    Piece,
    Places,
    build,
    is_before,
    is_copied,
    reach,
)
from autopar.passes.pipeline.cuts.assign import staged, times_in
from autopar.passes.pipeline.cuts.backward_stages import weight_nodes
from autopar.passes.pipeline.cuts.cut import Stages
from autopar.passes.pipeline.cuts.sums import part_of, reduction_of
from autopar.passes.pipeline.cuts.when import CARRIES, When

# The times of a pipeline's graphs, of which those of slices of sequences grow with their place.


def costs_of(program: Program, graphs: Mapping[Key, Program], plan: Plan) -> Costs:
    """The times of graphs that were cut out of a LOCAL program."""
    machine = plan.fixed.machine
    times = {node.name: time for node, time in node_times(program, machine).items()}
    spent = dict.fromkeys(((place, _action_of(kind)) for place, kind in graphs), 0.0)
    growing: dict[Key, float] = {}
    for (place, kind), graph in graphs.items():
        spent[place, _action_of(kind)] += sum(times[node.name] for node in graph.calls())
        growing[place, kind] = sum((times[node.name] for node in graph.calls() if sees_before(node)), 0.0)
    line = machine.message_line(group_of(plan.mesh, PIPELINE, machine.ranks))
    return Costs(spent, *line, growing, plan.slices)


def _action_of(kind: str) -> str:
    """The action that runs a graph: the prologue begins with its counts."""
    return "P" if kind == "C" else kind


def split_into_stages(program: Program, plan: Plan, places: Places) -> Pipeline:
    """LOCAL -> STAGED. The graphs of all stages: forward, backward (or input_grad and weight_grad), and of all ranks:
    prologue and epilogue; with what flows between them. One stage, whose forward (0F) and backward (0B) run once for
    each micro-batch, and the epilogue (0E) of its rank:

        mesh: dp=2
        microbatches: 2
        LOCAL program on dp=2,mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[1,8] of [4,8] [dp:mb,-] = batch "0"
        %mul: f32[1,8] of [4,8] [dp:mb,-] = aten.mul.Tensor(%x, %w)
        %exp: f32[1,8] of [4,8] [dp:mb,-] = aten.exp.default(%mul)
        %sum_1: f32[] [] partial(dp,mb) = aten.sum.default(%exp)
        %all_reduce: f32[] [] partial(dp) = autopar.all_reduce.default(%sum_1, "mb", "sum")
        %all_reduce_1: f32[] [] = autopar.all_reduce.default(%all_reduce, "dp", "sum")
        %mul_1: f32[1,8] of [4,8] [dp:mb,-] = aten.mul.Tensor(%x, %exp)   # backward
        %sum_2: f32[8] [-] partial(dp,mb) = aten.sum.dim_IntList(%mul_1, [0])   # backward
        %all_reduce_2: f32[8] [-] partial(dp) = autopar.all_reduce.default(%sum_2, "mb", "sum")   # backward
        %all_reduce_3: f32[8] [-] = autopar.all_reduce.default(%all_reduce_2, "dp", "sum")   # backward
        return loss "loss" = %all_reduce_1
        return gradient "w" = %all_reduce_3
    becomes
        graph 0B
        STAGED program on dp=2,mb=2
        %x: f32[1,8] of [4,8] [dp:mb,-] = batch "0"
        %exp: f32[1,8] of [4,8] [dp:mb,-] = saved "exp"
        %mul_1: f32[1,8] of [4,8] [dp:mb,-] = aten.mul.Tensor(%x, %exp)
        %sum_2: f32[8] [-] partial(dp,mb) = aten.sum.dim_IntList(%mul_1, [0])
        return part "all_reduce_2" = %sum_2
        graph 0E
        STAGED program on dp=2,mb=2
        %all_reduce: f32[] [] partial(dp) = step "all_reduce"
        %all_reduce_2: f32[8] [-] partial(dp) = step "all_reduce_2"
        %all_reduce_1: f32[] [] = autopar.all_reduce.default(%all_reduce, "dp", "sum")
        %all_reduce_3: f32[8] [-] = autopar.all_reduce.default(%all_reduce_2, "dp", "sum")
        return loss "loss" = %all_reduce_1
        return gradient "w" = %all_reduce_3
        graph 0F
        STAGED program on dp=2,mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[1,8] of [4,8] [dp:mb,-] = batch "0"
        %mul: f32[1,8] of [4,8] [dp:mb,-] = aten.mul.Tensor(%x, %w)
        %exp: f32[1,8] of [4,8] [dp:mb,-] = aten.exp.default(%mul)
        %sum_1: f32[] [] partial(dp,mb) = aten.sum.default(%exp)
        return part "all_reduce" = %sum_1
        return saved "exp" = %exp

    The layouts name the axis of micro-batches: what differs along it is a stage's, what is the same for all is computed
    once before them (prologue), and what they add up to after them (epilogue).
    """
    return _Partition(program, plan, places).run()


def graphs_of_stages(program: Program, plan: Plan, places: Places) -> dict[Key, Program]:
    """Make the graphs of `split_into_stages` alone."""
    return _Partition(program, plan, places).graphs()


class _Partition:
    def __init__(self, program: Program, plan: Plan, places: Places) -> None:
        self.plan, self.places = plan, places
        self.ranks, self.count = places.ranks, len(places.ranks)
        self.pieces: dict[Key, Piece] = {}
        self.outside: dict[Key, dict[fx.Node, FromOutside]] = {}
        found = staged(program, plan, places)
        self.program, self.forward = found.program, found.forward
        self.times, self.entries = times_in(self.program, plan), dict(self.program.entries)
        self.stages: Stages = {node: stage for node, stage in found.all.items() if self.times.of[node] is When.BODY}
        self.weights = weight_nodes(self.program, {n: s for n, s in self.stages.items() if n not in self.forward})

    def run(self) -> Pipeline:
        return self._pipeline(self.graphs())

    def graphs(self) -> dict[Key, Program]:
        self.owners = self._owners()
        trains = any(out.kind == "gradient" for out in self.program.outputs)
        self.middle = self.ranks[-1], "M"  # of all ranks: what is computed there flows back with the gradients
        for stage in range(self.count):
            for kind in self._kinds() if trains else ("F",):
                self._piece((stage, kind))
        for node, stage in self.stages.items():
            self._piece((stage, self._kind(node))).own[node] = None
        for node in self.program.nodes:
            if node in self.times.reductions and self.times.of[node] is When.AFTER:
                part = part_of(node)
                self._piece((self.stages[part], self._kind(part))).leave("part", node.name, part)
        for stage in range(self.count):
            self._take_in(stage)
        for rank in range(max(self.ranks) + 1):
            self._epilogue(rank)
        self._middle()
        for rank in range(max(self.ranks) + 1):
            self._prologue(rank)
        return {key: build(self.program, piece, self.outside[key]) for key, piece in sorted(self.pieces.items())}

    def _piece(self, key: Key) -> Piece:
        self.outside.setdefault(key, {})
        return self.pieces.setdefault(key, Piece())

    # -- where things are ---------------------------------------------------------------------------------------

    def _kinds(self) -> tuple[str, ...]:
        return ("F", "I", "W") if self.places.split else ("F", "B")

    def _kind(self, node: fx.Node) -> str:
        if node in self.forward:
            return "F"
        if not self.places.split:
            return "B"
        return "W" if node in self.weights else "I"

    def _owners(self) -> dict[str, int]:
        """The stage of each parameter: the first one that uses it, or the one that keeps it already."""
        given = self.plan.fixed.owners or {}
        return {
            entry.name: given[entry.name] if entry.name in given else min(self._stages_that_use(node), default=0)
            for node, entry in self.entries.items()
            if entry.kind == "parameter"
        }

    def _stages_that_use(self, node: fx.Node) -> set[int]:
        known, pending, stages_that_use = {node}, [node], set()
        while pending:
            for user in pending.pop().users:
                if user in self.stages:
                    stages_that_use.add(self.stages[user])
                elif user not in known and user.op != "output" and self.times.of[user] is When.INVARIANT:
                    known.add(user)
                    pending.append(user)
        return stages_that_use

    def _ranks_needed(self, node: fx.Node) -> set[int]:
        """The ranks that keep the parameters of which a value of the step is made."""
        ranks_needed = set()
        for known in reach([node], ()):
            entry = self.entries.get(known)
            if entry is not None and entry.kind == "parameter":
                ranks_needed.add(self.ranks[self.owners[entry.name]])
        return ranks_needed

    # -- what each action takes from others ---------------------------------------------------------------------

    def _take_in(self, stage: int) -> None:
        """What the actions of a stage need that is not their own."""
        made: dict[fx.Node, str] = {}  # values of the batch alone, with the action of this stage that computes them
        for kind in self._kinds():
            if (stage, kind) not in self.pieces:
                continue
            own = self.pieces[stage, kind].own
            known: set[fx.Node] = set()
            pending = [operand for node in own for operand in node.all_input_nodes]
            while pending:
                node = pending.pop()
                if node in own or node in known or node.op == "placeholder":
                    continue
                known.add(node)
                if self._enters(node, stage, kind, made):
                    pending += node.all_input_nodes

    def _enters(self, node: fx.Node, stage: int, kind: str, made: dict[fx.Node, str]) -> bool:
        """Let a value into a piece; True if the piece makes it itself."""
        outside, when = self.outside[stage, kind], self.times.of[node]
        if when is When.BODY:
            if _is_free(node, self.program.mesh):
                return True
            outside[node] = FromOutside("saved", node.name, record(node))
            self._piece((self.stages[node], self._kind(node))).leave("saved", node.name, node)
            return False
        if is_copied(node) or record(node).several or self._comes_anew(node):
            return True
        if when is When.INVARIANT:
            self._from_prologue(outside, node, self.ranks[stage])
            return False
        if when in (When.MIDDLE, When.AFTER):
            self._from_all(outside, node)
            return False
        if made.setdefault(node, kind) == kind:
            return True
        name = f"{node.name}_s{stage}"
        outside[node] = FromOutside("saved", name, record(node))
        self._piece((stage, made[node])).leave("saved", name, node)
        return False

    def _comes_anew(self, node: fx.Node) -> bool:
        """True for a cast of a parameter that each graph loads for itself."""
        source = node
        while source.op == "call_function" and source.all_input_nodes and (source.target is CAST or is_view(source)):
            source = source.all_input_nodes[0]
        is_parameter = source in self.entries and self.entries[source].kind == "parameter"
        return is_parameter and self.plan.offloads("parameters")

    def _from_prologue(self, outside: dict[fx.Node, FromOutside], node: fx.Node, rank: int) -> None:
        name = f"{node.name}_p{rank}"
        outside[node] = FromOutside("step", name, record(node))
        self._piece((rank, "P")).leave("step", name, node)

    def _from_all(self, outside: dict[fx.Node, FromOutside], node: fx.Node) -> None:
        """Let in what all micro-batches add up to, or what the graph between the passes makes of that."""
        if node in self.times.reductions:
            outside[node] = FromOutside("step", node.name, record(node))
        else:
            name = f"{node.name}_m"
            outside[node] = FromOutside("step", name, record(node))
            self._piece(self.middle).leave("step", name, node)

    def _middle(self) -> None:
        """What is made once, of what all forward passes add up to, and read by backward passes."""
        if self.middle in self.pieces:
            self._once(self.middle)

    def _epilogue(self, rank: int) -> None:
        """Gradients and new values of this rank's parameters, the loss, buffers and values."""
        piece = self._piece((rank, "E"))
        for node, out in self.program.leaving:
            assert node is not None
            if out.kind not in AS_PARAMETER or self.ranks[self.owners[out.name]] == rank:
                piece.leave(out.kind, out.name, node)
        self._once((rank, "E"))

    def _once(self, key: Key) -> None:
        """Let into a piece that runs once a step what it needs: of all micro-batches, and of none."""
        (rank, kind), piece, outside = key, self.pieces[key], self.outside[key]
        known: set[fx.Node] = set()
        pending = [node for _, node in piece.leaving]
        while pending:
            node = pending.pop()
            if node in known or node.op == "placeholder":
                continue
            known.add(node)
            is_middle = (
                kind == "E" and self.times.of[node] is When.MIDDLE and not (is_copied(node) or record(node).several)
            )
            if is_middle or (node in self.times.reductions and self.times.of[node] is When.AFTER):
                self._from_all(outside, node)
                continue
            if is_before(self.times, node) and not is_copied(node) and not record(node).several:
                needed = self._ranks_needed(node)
                if len(needed) <= 1:  # of one rank's parameters: computed there, since a result is smaller
                    self._from_prologue(outside, node, needed.pop() if needed else rank)
                    continue
            pending += node.all_input_nodes

    def _prologue(self, rank: int) -> None:
        """What is the same for all micro-batches, with what they add up to without any stage (counts of labels)."""
        if (rank, "P") not in self.pieces:
            return
        piece, outside = self._piece((rank, "P")), self.outside[rank, "P"]
        reductions = reach((node for _, node in piece.leaving), self.times.reductions) & self.times.reductions
        if not reductions:
            return
        count = self._piece((rank, "C"))
        for node in self.program.nodes:
            if node in reductions:
                outside[node] = FromOutside("step", node.name, record(node))
                count.leave("step", node.name, node)

    # -- putting it together ------------------------------------------------------------------------------------

    def _pipeline(self, graphs: Mapping[Key, Program]) -> Pipeline:
        works: dict[Key, Work] = {}
        types: dict[str, TensorType] = {}
        owners: dict[str, tuple[int, ...]] = {}
        for key, graph in graphs.items():
            if key[1] == "C":
                continue
            rank = self.ranks[key[0]] if key[1] in "FBIW" else key[0]
            foreign = self._foreign(graph, rank)
            owners.update(foreign)
            counting = graphs.get((rank, "C")) if key[1] == "P" else None
            counted = {out.name for out in counting.outputs} if counting is not None else set()
            works[key] = _work(graph, tuple(foreign), counted)
            types.update(border_types(graph))
        flow = Flow(self.ranks, self.plan.parts, works, types, owners, self.plan.slices)
        found = [node for node in self.program.nodes if node in self.times.reductions]
        reductions = {node.name: reduction_of(node) for node in found}
        types.update((node.name, local_type(node, self.program.mesh)) for node in found)
        return Pipeline(
            self.plan.mesh, flow, graphs, reductions, self.owners, costs_of(self.program, graphs, self.plan)
        )

    def _foreign(self, graph: Program, rank: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a graph that another rank keeps, with that rank."""
        return {
            node.name: (self.ranks[self.owners[entry.name]],)
            for node, entry in graph.entries
            if entry.kind == "parameter" and self.ranks[self.owners[entry.name]] != rank
        }


def border_types(graph: Program, kinds: Collection[str] | None = None) -> dict[str, TensorType]:
    """The types of what enters and leaves a graph, by name. kinds: of inputs and outputs, all by default."""
    found = [(node.name, node) for node, entry in graph.entries if kinds is None or entry.kind in kinds]
    found += [(out.name, node) for node, out in graph.leaving if node is not None and (not kinds or out.kind in kinds)]
    return {name: local_type(node, graph.mesh) for name, node in found}


def _is_free(node: fx.Node, mesh: Mesh) -> bool:
    """True for what is made again where it is needed: a view that is no smaller than what it is a view of, and how many
    rows a value has here."""
    if node.target is torch.ops.aten.sym_size.int:
        return True
    source = node.args[0] if node.args else None
    if not is_view(node) or not isinstance(source, fx.Node) or not record(node).is_tensor:
        return False
    return record(source).is_tensor and local_bytes(node, mesh) >= local_bytes(source, mesh)


def _work(graph: Program, foreign: tuple[str, ...], counted: set[str]) -> Work:
    """What a graph reads and writes; `counted` are the rank's own counts, which come and go with the prologue."""

    def entering(kind: str) -> tuple[str, ...]:
        return tuple(entry.name for entry in graph.inputs if entry.kind == kind and entry.name not in counted)

    def leaving(kind: str) -> tuple[str, ...]:
        return tuple(out.name for out in graph.outputs if out.kind == kind)

    carries = (str(node.args[-1]) for node in graph.calls() if node.target in CARRIES)
    return Work(
        entering("saved"), leaving("saved"), leaving("part"), (*entering("step"), *foreign), leaving("step"),
        tuple(dict.fromkeys(carries)),
    )  # fmt: skip
