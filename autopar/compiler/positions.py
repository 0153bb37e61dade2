"""Check that cp and slices divide the positions of the batch: those that it has, and those that are cut out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.errors import BatchError, divisors, one_of
from autopar.ir.mesh import SLICE
from autopar.ir.plan import Plan
from autopar.ir.program import Program, operand_nodes, record
from autopar.passes.rules import call_of, replicated_rule, rule_of, table_of
from autopar.passes.rules.rule import Table
from autopar.passes.search.intents import context_axes

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True, slots=True)
class Positions:
    """A dim that may be a sequence."""

    count: int
    where: str


def with_positions(plan: Plan, program: Program) -> Plan:
    """The plan with what is done where cp (or ulysses) divides no sequence of the batch: every rank computes all of it;
    or where slices do not: it is not cut.

    Raises BatchError if that may be refused. What has no sequence, images say, is judged by its products.
    """
    axes = context_axes(plan.layout_mesh)
    size = math.prod(size for _, size in axes)
    found = positions_of(program, table_of(plan), plan.batch_dims) if axes else []
    plan = _with_lengths(plan, found)
    if not found or any(one.count % size == 0 for one in found):
        return plan
    if plan.fixed.uneven:
        return with_positions(_unsliced(plan), program) if plan.slices > 1 else replace(plan, context_replicated=True)
    count, padded = found[0].count, -(-found[0].count // size) * size
    names = ["slices" if axis == SLICE else axis for axis, _ in axes]
    spelled = " x ".join(f"{name}={ranks}" for name, (_, ranks) in zip(names, axes, strict=True))
    raise BatchError(
        f"{spelled} does not divide the {count} positions ({found[0].where}): pad to {padded}, or use "
        f"{'' if names == ['slices'] else 'a '}{' x '.join(names)} of {one_of(divisors(count))}."
    )


def _with_lengths(plan: Plan, positions: Sequence[Positions]) -> Plan:
    """The plan with the lengths of slices that were asked for; without slices for what is not as long as they are.

    Raises BatchError if that may be refused."""
    lengths = plan.options.slices
    if isinstance(lengths, (int, str)) or plan.slices == 1 or not positions:
        return plan
    if any(one.count == sum(lengths) for one in positions):
        return replace(plan, slice_lengths=tuple(lengths) if len(set(lengths)) > 1 else ())
    if plan.fixed.uneven:
        return _unsliced(plan)
    raise BatchError(
        f"slices={list(lengths)} are {sum(lengths)} positions, but there are {positions[0].count} "
        f"({positions[0].where}). Give lengths that add up to {positions[0].count}, or slices={len(lengths)}."
    )


def _unsliced(plan: Plan) -> Plan:
    """Take slices, which are a matter of time alone, out of a plan."""
    return replace(plan, options=replace(plan.options, slices=1), slice_lengths=())


def positions_of(program: Program, table: Table, batch_dims: Mapping[str, int | None] | None) -> list[Positions]:
    """The sequence of the batch's tensors of 2 or 3 dims that are used whole; if none is, of what is cut out of them:
    `x[:, :-1]`. Of those whose samples are said to lie behind another dim it is not known."""
    behind = {name for name, dim in (batch_dims or {}).items() if dim}
    cuts = dict(_cuts(program, table))
    found = [
        Positions(shape[dim], f"dim {dim} of batch tensor {entry.name}")
        for node, entry in program.entries
        if entry.kind == "batch" and entry.name not in behind and len(shape := record(node).type.shape) in (2, 3)
        if any(user not in cuts for user in node.users)
        for dim in (_sequence_dim(node),)
    ]
    return found or list(cuts.values())


def _sequence_dim(node: fx.Node) -> int:
    """Dim 1; of what is only convolved the one behind the channels."""
    channels_first = node.users and all(user.target in _CONVOLUTIONS for user in node.users)
    return 2 if channels_first and len(record(node).type.shape) == 3 else 1


def _cuts(program: Program, table: Table) -> Iterator[tuple[fx.Node, Positions]]:
    """The calls on tensors of the batch through which no split of the positions gets."""
    batch = {node for node, entry in program.entries if entry.kind == "batch"}
    for node in program.calls():
        known, operands = record(node), {*operand_nodes(node)}
        if not (known.is_tensor and operands and operands <= batch) or len(known.type.shape) not in (2, 3):
            continue
        found = rule_of(call_of(node), table)
        rule = found[0] if found else replicated_rule(call_of(node))
        if rule.results[0][1] and rule.replicated & {*rule.results[0][1]}:
            where = f"%{node.name}{f' at {known.source}' if known.source else ''}, cut out of the batch"
            yield node, Positions(known.type.shape[1], where)
