"""Values of parameters alone that ZeRO-3 gathers for each micro-batch, and that several stages use."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from torch import fx

from autopar.ir.program import Builder, Program, record, set_record
from autopar.passes.pipeline.cuts.cut import Stages


def gathered_by_stage(
    program: Program, renewed: AbstractSet[fx.Node], stages: Stages
) -> tuple[Program, Mapping[fx.Node, fx.Node], Stages]:
    """Each stage gathers what it uses, so that of a parameter of another stage its shard is sent once a step, and not
    what is gathered of it for every micro-batch; with the new node of each old one, and the stages of the gathers.

        stage 0: all_gather mul
        stage 1: mul_1
        LOCAL program on dp=2
        %w: f32[4] of [8] [dp] = parameter "w"
        %x: f32[4,8] [-,-] = batch "0"
        %all_gather: f32[8] [-] = autopar.all_gather.default(%w, "dp", 0, 1)
        %mul: f32[4,8] [-,-] = aten.mul.Tensor(%x, %all_gather)
        %mul_1: f32[4,8] [-,-] = aten.mul.Tensor(%mul, %all_gather)
        return value "y" = %mul_1
    becomes
        LOCAL program on dp=2
        %w: f32[4] of [8] [dp] = parameter "w"
        %x: f32[4,8] [-,-] = batch "0"
        %all_gather: f32[8] [-] = autopar.all_gather.default(%w, "dp", 0, 1)
        %all_gather_s1: f32[8] [-] = autopar.all_gather.default(%w, "dp", 0, 1)
        %mul: f32[4,8] [-,-] = aten.mul.Tensor(%x, %all_gather)
        %mul_1: f32[4,8] [-,-] = aten.mul.Tensor(%mul, %all_gather_s1)
        return value "y" = %mul_1

    renewed: what is gathered, and what is made of it alone.
    """
    users = _stages_of_users(program, renewed, stages)
    build, placed = Builder("stages"), Stages()
    copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def put(node: fx.Node) -> fx.Node:
        if node not in users:
            return build.copy(node, lambda old: copies.get((old, stages.get(node, -1))) or build.value[old])
        for stage in sorted(users[node]):
            copies[node, stage] = made = _copied(build, node, stage, copies)
            placed[made] = stage
            build.value.setdefault(node, made)
        return build.value[node]

    return build.rewrite(program, put), build.value, placed


def _stages_of_users(program: Program, renewed: AbstractSet[fx.Node], stages: Stages) -> dict[fx.Node, set[int]]:
    """Find the stages that use each value that is gathered anew."""
    nodes: dict[fx.Node, set[int]] = {}
    for node in reversed(program.nodes):
        if node in renewed and node in stages:
            uses = [nodes.get(user) or {stages[user]} for user in node.users if user in stages]
            nodes[node] = set().union(*uses) or {stages[node]}
    return nodes


def _copied(build: Builder, node: fx.Node, stage: int, copies: Mapping[tuple[fx.Node, int], fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda old: copies.get((old, stage)) or build.value[old]
    )
    name = f"{node.name}_s{stage}" if node in build.value else node.name
    made = build.graph.create_node(node.op, node.target, args, kwargs, name=name)
    set_record(made, record(node))
    return made
