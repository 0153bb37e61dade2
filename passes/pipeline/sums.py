"""Gradient accumulation across stages: each stage adds locally, and the sum over stages is sent once per step."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import MICROBATCH, axes_of_group
from autopar.ir.ops import is_collective, op
from autopar.ir.pipeline import Join, Reduction
from autopar.ir.program import Builder, Program, Record, record, set_record
from autopar.passes.pipeline.cut import Stages
from autopar.passes.pipeline.when import Times, When, is_join, times_of

ADD, CAST = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default


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
            like = record(node).with_(operands=record(node).layouts, flops=0)  # type: ignore[arg-type]
            made = build.call(
                op("all_reduce"), build.value[node], MICROBATCH, "sum", like=like, name=f"{node.name}_total"
            )
            joined[node] = made
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


def sums_by_stage(program: Program, times: Times, stages: Stages) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Where stages add to one another what micro-batches add up to, the micro-batches come first; with the new node of
    each old one. The gradient of a weight that two stages use:

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
    """
    reductions = {node: node.args[0] for node in times.reductions if times.of[node] is When.AFTER}
    late = {
        one: join
        for join, part in reductions.items()
        if isinstance(part, fx.Node) and reduction_of(join).joins[-1].kind == "sum"
        for one in _additions(part, stages)
    }
    build = Builder("stages")

    def put(node: fx.Node) -> fx.Node | None:
        part = reductions.get(node)
        return _total(build, part, node, late) if isinstance(part, fx.Node) and part in late else None

    return build.rewrite(program, put, later=late), build.value


def with_casts_of_terms(times: Times, stages: Stages) -> Stages:
    """The stages, with the cast of each term of a sum over micro-batches and stages where its operand is: a term that
    is added up there leaves once a step, and the fewer bytes of what a cast widens would for every micro-batch."""
    found = dict(stages)
    for join in times.reductions:
        part = join.args[0]
        terms = _terms(_added(part)) if isinstance(part, fx.Node) else set()
        for term in terms:
            if term.target is CAST and len(term.users) == 1 and term in found:
                found[term] = found.get(term.all_input_nodes[0], found[term])
    return found


def _additions(node: fx.Node, stages: Stages) -> list[fx.Node]:
    """The sums of terms of different stages, that nothing but a join and one another reads."""
    left, right = (*node.args, None, None)[:2]
    if not _is_sum(node) or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    found = [node, *_additions(left, stages), *_additions(right, stages)]
    terms = _terms(found)
    if len({stages.get(term) for term in terms}) == 1 or not all(term in stages for term in terms):
        return []
    return found


def _added(node: fx.Node) -> list[fx.Node]:
    """The sums of terms, that nothing but a join and one another reads."""
    return [node, *(one for arg in node.all_input_nodes for one in _added(arg))] if _is_sum(node) else []


def _is_sum(node: fx.Node) -> bool:
    is_plain = node.target is ADD and not node.kwargs and len(node.users) == 1
    return is_plain and len(node.all_input_nodes) == 2


def _terms(sums: list[fx.Node]) -> set[fx.Node]:
    return {arg for one in sums for arg in one.all_input_nodes} - set(sums)


def _total(build: Builder, node: object, join: fx.Node, late: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value summed over the micro-batches."""
    assert isinstance(node, fx.Node)
    like = _summed(record(node), str(join.args[1]))
    if node not in late:
        made = build.call(join.target, build.value[node], *join.args[1:], like=like, name=f"{node.name}_total")  # type: ignore[arg-type]
        set_record(made, record(made).with_(operands=(record(node).layout,)))
        return made
    if node not in build.value:
        args = [_total(build, arg, join, late) for arg in node.args]
        like = like.with_(operands=tuple(record(arg).layout for arg in args))
        build.value[node] = build.call(ADD, *args, like=like, name=node.name)
    return build.value[node]


def _summed(found: Record, axes: str) -> Record:
    partial = tuple((axis, kind) for axis, kind in found.layout.partial if axis not in axes_of_group(axes))
    return found.with_(layouts=(Layout(found.layout.dims, partial),), flops=0)
