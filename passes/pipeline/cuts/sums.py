"""Gradient accumulation across stages: each stage adds locally, and the sum over stages is sent once per step."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import MICROBATCH, axes_of_group
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.pipeline import Join, Reduction
from autopar.ir.program import Builder, Program, Record, record
from autopar.passes.pipeline.cuts.cut import Stages
from autopar.passes.pipeline.cuts.terms import ADD, is_sum, paths_to_terms, start_of, steps_behind, sums_of
from autopar.passes.pipeline.cuts.when import NodeTimes, When, is_join, times_of


def reduction_of(node: fx.Node) -> Reduction:
    """How a join, with those before it, takes the parts together."""
    joins: list[Join] = []
    while is_join(node):
        source, axis, *rest = node.args
        joins.insert(0, Join(rest[0], axis) if node.target is op("all_reduce") else Join("gather", axis, *rest))  # type: ignore[arg-type]
        assert isinstance(source, fx.Node)
        node = source
    return Reduction(tuple(joins))


def part_of(node: fx.Node) -> fx.Node:
    """What each micro-batch gives to a join, maybe by way of other joins."""
    while is_join(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def with_reductions(program: Program) -> Program:
    """The program of a single micro-batch with a join, of one part, before all that leaves it from a stage; before the
    collective by which it leaves, if there is one, so that gradients are reduced once a step here too."""
    when = times_of(program, 1).of
    output = program.graph.output_node()
    build = Builder("stages")
    joined: dict[fx.Node, fx.Node] = {}

    def join(node: fx.Node) -> fx.Node:
        if when[node] is not When.BODY:
            return build.value[node]
        if node not in joined:
            like, name = record(node).with_(flops=0), f"{node.name}_total"
            joined[node] = build.lay(op("all_reduce"), build.value[node], MICROBATCH, "sum", like=like, name=name)
        return joined[node]

    last = {node for node in program.results if node is not None and set(node.users) == {output}}
    last = {node for node in last if node.op == "call_function" and is_collective(node.target)}

    def put(node: fx.Node) -> fx.Node | None:
        if node is output:
            leaving = [result for result in program.results if result is not None]
            return build.output((build.value[x] if x in last else join(x) for x in leaving), record(node))
        if node in last:
            total = join(node.args[0])  # type: ignore[arg-type]
            return build.call(node.target, total, *node.args[1:], like=record(node), name=node.name)  # type: ignore[arg-type]
        return None

    return build.rewrite(program, put)


def sums_by_stage(
    program: Program, times: NodeTimes, stages: Stages
) -> tuple[Program, Mapping[fx.Node, fx.Node], Stages]:
    """Where stages add to one another what micro-batches add up to, the micro-batches come first; with the new node of
    each old one, and the stages of those that stand for no old one. The gradient of a weight that two stages use:

        microbatches: 2
        stage 0: mul sum_1 add
        stage 1: exp sum_2
        LOCAL program on mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[2,8] of [4,8] [mb,-] = batch "0"
        %mul: f32[2,8] of [4,8] [mb,-] = aten.mul.Tensor(%x, %w)
        %sum_1: f32[8] [-] partial(mb) = aten.sum.dim_IntList(%mul, [0])
        %exp: f32[2,8] of [4,8] [mb,-] = aten.exp.default(%mul)
        %sum_2: f32[8] [-] partial(mb) = aten.sum.dim_IntList(%exp, [0])
        %add: f32[8] [-] partial(mb) = aten.add.Tensor(%sum_1, %sum_2)
        %all_reduce: f32[8] [-] = autopar.all_reduce.default(%add, "mb", "sum")
        return gradient "w" = %all_reduce
    becomes
        LOCAL program on mb=2
        %w: f32[8] [-] = parameter "w"
        %x: f32[2,8] of [4,8] [mb,-] = batch "0"
        %mul: f32[2,8] of [4,8] [mb,-] = aten.mul.Tensor(%x, %w)
        %sum_1: f32[8] [-] partial(mb) = aten.sum.dim_IntList(%mul, [0])
        %exp: f32[2,8] of [4,8] [mb,-] = aten.exp.default(%mul)
        %sum_2: f32[8] [-] partial(mb) = aten.sum.dim_IntList(%exp, [0])
        %sum_1_total: f32[8] [-] = autopar.all_reduce.default(%sum_1, "mb", "sum")
        %sum_2_total: f32[8] [-] = autopar.all_reduce.default(%sum_2, "mb", "sum")
        %add: f32[8] [-] = aten.add.Tensor(%sum_1_total, %sum_2_total)
        return gradient "w" = %add

    What happens to the sum before micro-batches are added up (with ZeRO-2 and ZeRO-3 it is scattered over the data
    axes) happens to each term instead, on the stage of that term: so what leaves that stage is a rank's part.
    """
    parts = {node: part for node in times.reductions if isinstance(part := node.args[0], fx.Node)}
    sums: dict[fx.Node, set[fx.Node]] = {}  # of each join, those that come after it
    terms: dict[fx.Node, list[tuple[fx.Node, tuple[fx.Node, ...]]]] = {}  # with a join, and what happens before it
    passed: set[fx.Node] = set()  # what stands between terms and their join
    for join, part in parts.items():
        is_late_sum = times.of[join] is When.AFTER and reduction_of(join).joins[-1].kind == "sum"
        late = _additions(part, stages) if is_late_sum else set()
        if not late:
            continue
        sums[join] = late
        for term, steps in paths_to_terms(part, late):
            terms.setdefault(term, []).append((join, steps))
            passed.update(late, steps)
    build, placed = Builder("stages"), Stages()
    totals: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def put(node: fx.Node) -> fx.Node | None:
        for join, steps in terms.get(node, ()):
            made = build.value[node] if node in build.value else build.copy(node)
            for step in reversed(steps):
                made = _alone(build, step, made, node)
                placed[made] = stages[node]
            totals[join, node] = made
        if node in sums:
            return _total(build, node, parts[node], sums[node], totals)
        return build.value.get(node)

    rewritten = build.rewrite(program, put, later=passed)
    return rewritten, build.value, placed


def with_steps_of_terms(times: NodeTimes, stages: Stages) -> Stages:
    """The stages, with what happens to each term of a sum over micro-batches and stages (a cast) where the term is
    made: it is added up there and leaves once a step, and the fewer bytes of what a cast widens would for every
    micro-batch."""
    found = dict(stages)
    for join in times.reductions:
        part = join.all_input_nodes[0]
        for term, _ in paths_to_terms(part, sums_of(part)):
            if start_of(term) in found:  # the backward pass of a micro-batch alone is placed
                found |= dict.fromkeys(steps_behind(term), found[start_of(term)])
    return found


def _additions(node: fx.Node, stages: Stages) -> set[fx.Node]:
    """The sums of terms of different stages, that nothing but a join and one another reads, maybe step by step."""
    total = start_of(node)
    if not is_sum(total):
        return set()
    found = {total}.union(*(_additions(arg, stages) for arg in total.all_input_nodes))
    terms = {term for term, _ in paths_to_terms(node, found)}
    return found if terms <= stages.keys() and len({stages[term] for term in terms}) > 1 else set()


def _alone(build: Builder, step: fx.Node, made: fx.Node, term: fx.Node) -> fx.Node:
    """What happens to a sum, done to one of its terms."""
    args, kwargs = fx.node.map_arg((step.args, dict(step.kwargs)), lambda _: made)
    return build.lay(step.target, *args, like=record(step), name=f"{term.name}_{step.name}", **kwargs)  # type: ignore[arg-type]


def _total(
    build: Builder,
    join: fx.Node,
    part: fx.Node,
    late: Container[fx.Node],
    totals: Mapping[tuple[fx.Node, fx.Node], fx.Node],
) -> fx.Node:
    """The sum over the micro-batches of what a join reads, by terms."""
    total, axes = start_of(part), str(join.args[1])
    if total not in late:
        made = totals[join, part]
        like, name = _summed(record(made), axes), f"{part.name}_total"
        return build.lay(join.target, made, *join.args[1:], like=like, name=name)  # type: ignore[arg-type]
    args = [_total(build, join, arg, late, totals) for arg in total.args]  # type: ignore[arg-type]
    like = record(total).with_(types=record(args[0]).types, layouts=record(args[0]).layouts, flops=0)
    return build.lay(ADD, *args, like=like, name=total.name)


def _summed(known: Record, axes: str) -> Record:
    partial = tuple((axis, kind) for axis, kind in known.layout.partial if axis not in axes_of_group(axes))
    return known.with_(layouts=(Layout(known.layout.dims, partial),), flops=0)
