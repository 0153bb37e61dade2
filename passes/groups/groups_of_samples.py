"""Follow the samples of a batch to the normalisations that take those of a micro-batch together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import BatchError, PlanError
from autopar.ir.mesh import DATA_AXES
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_getitem, operand_nodes, record, source_of
from autopar.passes.rules import call_of, table_of
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import through
from autopar.passes.search.intents import batch_dims_of

IN_GROUPS, IN_MICROBATCHES = op("in_groups"), op("in_microbatches")
_LEAVES = torch.ops.aten.reshape.default  # that a norm ends with
Value = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True)
class SampleGroups:
    """How the rows of a tensor are dealt: [before, ranks, parts, ...] of its dim 0, where each part of a rank is one.
    Rows that hang on no sample are the same in every group: there is one."""

    before: int = 1
    ranks: int = 1
    parts: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        """The dims before the samples of a group."""
        return self.before, self.ranks * self.parts


def groups_of(program: Program, plan: Plan) -> dict[fx.Node, SampleGroups]:
    """The groups of every call of `in_groups` that makes some, in the order of the program.

    Raises BatchError for a normalisation whose rows are not samples, each from one micro-batch of one rank."""
    ranks = _ranks(plan)
    # Statistics of a rank may need its micro-batches together, as those of the batch do.
    parts = plan.microbatches if plan.options.batch_statistics == "microbatch" else 1
    marked = [node for node in program.calls() if node.target is IN_GROUPS and len(operand_nodes(node)) == 1]
    if ranks * parts == 1:
        return dict.fromkeys(marked, SampleGroups())
    splits, lost = _follow(program, plan, ranks * parts) if marked else ({}, {})
    found = {}
    for node in marked:
        (source,) = (source_of(operand) for operand in operand_nodes(node))
        if source in splits and splits[source][0] == 0:
            if node.args[1] and ranks > 1 and parts > 1:
                raise PlanError(_synced(node, ranks, parts))
            found[node] = SampleGroups(splits[source][1], 1 if node.args[1] else ranks, parts)
        elif source in splits or source[0] in lost:
            why = lost.get(source[0]) or f"its samples lie in dim {splits[source][0]}"
            raise BatchError(_rearranged(node, why, plan))
        else:
            found[node] = SampleGroups()
    return found


def parts_of_batch(plan: Plan) -> int:
    """The number of micro-batches of all data ranks."""
    return _ranks(plan) * plan.microbatches


def deals_microbatches(program: Program, count: int | None = None) -> bool:
    """True if `autopar.per_microbatch` deals samples to micro-batches. count: to another number of them."""
    return any(node.target is IN_MICROBATCHES and node.args[1] != count for node in program.calls())


def check_microbatches(program: Program, plan: Plan) -> None:
    """Raises BatchError or PlanError where the rows that `autopar.per_microbatch` deals are not samples, each from one
    micro-batch."""
    count = parts_of_batch(plan)
    marked = [node for node in program.calls() if node.target is IN_MICROBATCHES]
    if not marked:
        return
    splits, lost = _follow(program, plan, count) if count > 1 else ({}, {})
    for node in marked:
        (source,) = (source_of(operand) for operand in operand_nodes(node))
        rows = record(operand_nodes(node)[0]).type.shape[0]
        said = f"autopar.per_microbatch{_at(node)}"
        if rows % count:
            raise BatchError(
                f"{said}: {rows} rows are not those of {count} micro-batches (of all data ranks). Give it a row for "
                f"each sample, or as many rows of each."
            )
        if node.args[1] != count:
            raise PlanError(
                f"{said} has the rows of {node.args[1]} micro-batches and the step has {count}: their number must be "
                f"known before the step is captured. Write a mesh and microbatches= in place of a plan."
            )
        why = lost.get(source[0])
        if why is None and source in splits and splits[source] != (0, 1):
            dim, before = splits[source]
            why = f"its samples lie in dim {dim}" if dim else f"its rows have {before} parts with all samples in each"
        if why is not None:
            raise BatchError(
                f"{said} takes rows that are not the samples of the batch one by one ({why}), so that no part of them "
                f"is a micro-batch's own. Give it the samples in dim 0 and in their order."
            )


def _ranks(plan: Plan) -> int:
    return 1 if plan.batch_replicated else math.prod(size for axis, size in plan.mesh.axes if axis in DATA_AXES)


def _follow(program: Program, plan: Plan, count: int) -> tuple[dict[Value, Split], dict[fx.Node, str]]:
    """Where values have the samples of the batch; and of those that hang on samples but have none apart the reason. One
    operand that has them tells where a result does, whatever is known of the others. The backward pass may compute
    norms again. count: of the parts that samples are dealt to."""
    table = table_of(plan)
    entries = [(entry, record(node).type) for node, entry in program.entries]
    dims = batch_dims_of(entries, plan.batch_dims)
    splits: dict[Value, Split] = {}
    for node, entry in program.entries:
        if entry.kind == "batch" and entry.name in dims:
            splits[node, 0] = (dims[entry.name], 1)
    lost: dict[fx.Node, str] = {}
    inside: set[fx.Node] = set()  # of a norm: what it adds up are the samples of a group
    for node in program.calls():
        if is_getitem(node):
            continue
        if node.target is IN_MICROBATCHES:
            lost[node] = f"it is dealt to micro-batches already{_at(node)}"
            continue
        if node.target is IN_GROUPS or (node.target is not _LEAVES and not inside.isdisjoint(node.all_input_nodes)):
            inside.add(node)
        operands = [source_of(operand) for operand in operand_nodes(node)]
        known = {i: splits[value] for i, value in enumerate(operands) if value in splits}
        if not known:
            before = next((lost[value[0]] for value in operands if value[0] in lost), None)
            if before is not None:
                lost[node] = before
            continue
        way = through(call_of(node), known, table, count, adds=False, moves=False)
        if isinstance(way, str):
            lost[node] = f"{way}: op '{node.target}'{_at(node)}"
            continue
        splits |= {(node, i): at for i, at in enumerate(way.results) if at is not None}
        if None in way.results and node not in inside:
            lost[node] = f"samples are taken together: op '{node.target}'{_at(node)}"
    return splits, lost


def _rearranged(node: fx.Node, why: str, plan: Plan) -> str:
    asked = plan.options.batch_statistics
    part = "micro-batch" if asked == "microbatch" else "data rank"
    return (
        f"batch_statistics='{asked}': {name_of(node)} takes rows that are not the samples of the batch one by one "
        f"({why}), so that no part of them is a {part}'s own. Give it the samples in dim 0 and in their order, or use "
        f"batch_statistics='batch' with microbatches=1."
    )


def _synced(node: fx.Node, ranks: int, parts: int) -> str:
    return (
        f"batch_statistics='microbatch': {name_of(node)} is a SyncBatchNorm, which takes the samples of all {ranks} "
        f"data ranks together, in each of {parts} micro-batches: that is not supported. Use microbatches=1, one data "
        f"rank, or nn.BatchNorm, whose statistics are those of a micro-batch on a rank."
    )


def name_of(node: fx.Node) -> str:
    module = record(node).module
    return f"the norm '{module}'{_at(node)}" if module else f"a norm{_at(node)}"


def _at(node: fx.Node) -> str:
    return f" at {record(node).source}" if record(node).source else ""
