"""Place each recomputed node on the stage of its original."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch import fx

from autopar.ir.program import Builder, Program, record
from autopar.passes.pipeline.cuts.cut import Stages

MADE_BY = "recompute"  # the pass that makes clones


def originals(program: Program) -> dict[fx.Node, fx.Node]:
    """The forward node that each clone repeats: the same call of the same values, for the same captured node."""
    originals: dict[fx.Node, fx.Node] = {}
    firsts: dict[fx.Node, fx.Node] = {}  # of equal calls the first one, which a clone of any of them is like
    calls: dict[tuple[object, ...], fx.Node] = {}
    for node in program.calls():
        is_clone = record(node).made_by == MADE_BY
        if record(node).is_backward and not is_clone:
            continue
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda old: firsts.get(old, old))
        known = record(node)
        key = (node.target, str(args), known.origin, known.module, known.source)
        if not is_clone:
            firsts[node] = calls.setdefault(key, node)
        elif key in calls:
            originals[node] = firsts[node] = calls[key]
    return originals


def kept_across(
    program: Program, stages: Stages, renewed: AbstractSet[fx.Node] = frozenset()
) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Where a stage would read what another one computes again, it reads the value that the forward pass sent to it;
    with the new node of each old one. renewed: what is not sent, since every stage gathers it. Nor is what is made of
    the batch alone, which lies on no stage.

        stage 0: gelu gelu_recomputed
        stage 1: mul
        LOCAL program
        %x: f32[4,8] [-,-] = batch "0"
        %gelu: f32[4,8] [-,-] = aten.gelu.default(%x)
        %gelu_recomputed: f32[4,8] [-,-] = aten.gelu.default(%x)   # backward  by recompute  from gelu
        %mul: f32[4,8] [-,-] = aten.mul.Tensor(%gelu_recomputed, 2)   # backward
        return value "y" = %mul
    becomes
        LOCAL program
        %x: f32[4,8] [-,-] = batch "0"
        %gelu: f32[4,8] [-,-] = aten.gelu.default(%x)
        %mul: f32[4,8] [-,-] = aten.mul.Tensor(%gelu, 2)
        return value "y" = %mul
    """
    original = originals(program)
    build = Builder("stages")

    def put(node: fx.Node) -> fx.Node:
        def seen(operand: fx.Node) -> fx.Node:
            is_again = operand in original and operand in stages and operand not in renewed
            is_sent = is_again and node in stages and stages[operand] != stages[node]
            return build.value[original[operand] if is_sent else operand]

        return build.copy(node, seen)

    rewritten = build.rewrite(program, put)
    for node in reversed(original):
        if not build.value[node].users:
            rewritten.graph.erase_node(build.value.pop(node))
    return rewritten, build.value
