"""expert_tables: what rows look up by their expert, a bias or a scale, is read as the experts' matrices are."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op, semantic_of
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, operand_nodes, record
from autopar.passes.rules import call_of, rule_of, table_of
from autopar.passes.rules.rule import Table

MADE_BY = "expert_tables"
aten = torch.ops.aten


def expert_tables(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. On a mesh with `ep`, `table[index]` by the index that tells each row's expert is a lookup
    that may be split over the experts. An index that does not exist is an error where rows are sent (`route`).

        mesh: ep=2
        CAPTURED program
        %w: f32[4,8,5] = parameter "w"
        %bias: f32[4,5] = parameter "bias"
        %x: f32[6,8] = batch "0"
        %expert: i64[6] = batch "1"
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%x, %w, %expert)
        %index: f32[6,5] = aten.index.Tensor(%bias, [%expert])
        %add: f32[6,5] = aten.add.Tensor(%expert_mm, %index)
        return value "y" = %add
    becomes
        CAPTURED program
        %w: f32[4,8,5] = parameter "w"
        %bias: f32[4,5] = parameter "bias"
        %x: f32[6,8] = batch "0"
        %expert: i64[6] = batch "1"
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%x, %w, %expert)
        %index: f32[6,5] = autopar.embedding.default(%bias, %expert)
        %add: f32[6,5] = aten.add.Tensor(%expert_mm, %index)
        return value "y" = %add
    """
    if not plan.expert_axes:
        return program
    experts = _experts(program, table_of(plan))
    build = Builder(MADE_BY)

    def put(node: fx.Node) -> fx.Node | None:
        found = _lookup(node, experts)
        if found is None:
            return None
        target, operand, index, rest = found
        return build.call(target, build.value[operand], build.value[index], *rest, like=record(node), name=node.name)

    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made


def _experts(program: Program, table: Table) -> dict[fx.Node, int]:
    """The nodes that tell the expert of each row, with the number of experts."""
    experts = {}
    for node in program.calls():
        found = rule_of(call_of(node), table) if semantic_of(node.target) is not None else None
        if found and found[0].owned and found[0].flops:
            experts[operand_nodes(node)[found[0].owners_index]] = found[0].sizes[found[0].owned[1]]
    return experts


def _lookup(node: fx.Node, experts: dict[fx.Node, int]) -> tuple[Any, fx.Node, fx.Node, tuple[int, ...]] | None:
    """The op that stands for a lookup by expert, or for its gradient, with its arguments; None for any other call."""
    args: Any = node.args
    if node.target is op("embedding_backward"):
        grad, index, rows, ignored = args
        if index.target is aten.remainder.Scalar and index.args[1] == rows:
            index = index.args[0]  # negative values count from the end, and there are none
        return (node.target, grad, index, (rows, ignored)) if experts.get(index) == rows else None
    if node.target is not aten.index.Tensor or len(args[1]) != 1:
        return None
    table, (index,) = args
    shape = record(table).type.shape
    return (op("embedding"), table, index, ()) if len(shape) == 2 and experts.get(index) == shape[0] else None
