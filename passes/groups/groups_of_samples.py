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

IN_GROUPS = op("in_groups")
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
    ranks = 1 if plan.batch_replicated else math.prod(size for axis, size in plan.mesh.axes if axis in DATA_AXES)
    # Statistics of a rank may need its micro-batches together, as those of the batch do.
    parts = plan.microbatches if plan.options.batch_statistics == "microbatch" else 1
    marked = [node for node in program.calls() if node.target is IN_GROUPS and len(operand_nodes(node)) == 1]
    if ranks * parts == 1:
        return dict.fromkeys(marked, SampleGroups())
    splits, lost = _follow(program, plan, ranks * parts)
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


def _follow(program: Program, plan: Plan, count: int) -> tuple[dict[Value, Split], dict[fx.Node, str]]:
    """Where values have the samples of the batch; and of those that hang on samples but have none apart the reason. The
    backward pass may compute norms again. count: of the parts that samples are dealt to."""
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
        if node.target is IN_GROUPS or (node.target is not _LEAVES and not inside.isdisjoint(node.all_input_nodes)):
            inside.add(node)
        operands = [source_of(operand) for operand in operand_nodes(node)]
        known = {i: splits[value] for i, value in enumerate(operands) if value in splits}
        before = next((lost[value[0]] for value in operands if value[0] in lost), None)
        if before is not None:
            lost[node] = before
            continue
        if not known:
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
