"""Which samples does a normalisation take together, where it does not take the whole batch?"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.errors import BatchError
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, operand_nodes, record
from autopar.passes.groups.groups_of_samples import (
    IN_GROUPS,
    IN_MICROBATCHES,
    SampleGroups,
    check_microbatches,
    deals_microbatches,
    groups_of,
    name_of,
    parts_of_batch,
)

__all__ = ["SampleGroups", "deals_microbatches", "group", "groups_of", "parts_of_batch"]

aten = torch.ops.aten
AVERAGE = op("running_average")
_CHANNEL = 3  # behind the dims of groups
_COUNT, _MEAN = "num_batches_tracked", "running_mean"


def group(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Statistics of a micro-batch are those of a part of the batch that lies on one rank.

        mesh: dp=2
        CAPTURED program
        %x: f32[8,3] = batch "0"
        %in_groups: f32[1,1,8,3] = autopar.in_groups.default(%x, False)
        %sum_1: f32[1,1,1,3] = aten.sum.dim_IntList(%in_groups, [0, 2], True)
        %sum_2: f32[3] = aten.sum.dim_IntList(%sum_1, [0, 1, 2])
        return value "y" = %sum_2
    becomes
        CAPTURED program
        %x: f32[8,3] = batch "0"
        %in_groups: f32[1,2,4,3] = aten.reshape.default(%x, [1, 2, 4, 3])
        %sum_1: f32[1,2,1,3] = aten.sum.dim_IntList(%in_groups, [0, 2], True)
        %sum_2: f32[3] = aten.sum.dim_IntList(%sum_1, [0, 1, 2])
        return value "y" = %sum_2

    Behind such a sum of each group (%sum_1) stands its mean, by the count of a group, and all that a norm makes of it.
    This is what `batch_statistics` means, and no other pass changes what a program computes.
    The samples of a batch are dealt to data ranks in pieces, and those of a rank to its micro-batches: so a group is
    split over ranks or micro-batches by no layout that the search chooses, and nothing else knows of groups. This is
    "ghost batch normalisation" (arXiv 1705.08741).
    """
    if not any(node.target in (IN_GROUPS, IN_MICROBATCHES) for node in program.graph.nodes):
        return program
    check_microbatches(program, plan)
    return _Grouping(program, plan).run()


class _Grouping:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.build = program, Builder("group")
        self.groups = groups_of(program, plan)
        # What plain PyTorch does in a step: a rank sees its micro-batches one after another.
        self.updates = plan.microbatches if plan.options.batch_statistics == "microbatch" else 1
        self.averages = [node for node in program.calls() if node.target is AVERAGE]
        self.counts = self._counts()

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put)

    def _counts(self) -> set[fx.Node]:
        """The buffers that count the updates of the statistics that are written."""
        known = {operand_nodes(node)[0] for node in self.averages}
        entries = dict(self.program.entries)
        norms = {entries[node].name.removesuffix(_MEAN) for node in known if node in entries}
        return {node for node, entry in entries.items() if entry.name.removesuffix(_COUNT) in norms}

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function":
            return None
        if node.target is IN_GROUPS:
            return self._in_groups(node)
        if node.target is IN_MICROBATCHES:
            return self._reshaped(node, self.build.value[operand_nodes(node)[0]], record(node).type.shape)
        if node.target is AVERAGE:
            return self._average(node)
        if node.target is aten.add.Tensor and node.args[0] in self.counts and node.args[1] == 1:
            self.counts.add(node)
            return self._again(node, node.args[0], self.updates)
        if all(record(self.build.value[one]).types == record(one).types for one in node.all_input_nodes):
            return None
        if node.target is aten.div.Tensor and isinstance(node.args[1], (int, float)):
            return self._again(node, node.args[0], self._divisor(node))
        return self._again(node, *node.args, **node.kwargs)

    def _again(self, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """The call with other sizes."""
        given, named = self.build.new(args), self.build.new(kwargs)
        return self.build.infer(node.target, *given, like=record(node), name=node.name, **named)  # type: ignore[arg-type]

    def _in_groups(self, node: fx.Node) -> fx.Node:
        x, *like = operand_nodes(node)
        shape = record(x).type.shape
        if like:
            sizes = record(self.build.value[like[0]]).type.shape
        else:
            dealt = self.groups[node].sizes
            sizes = (*dealt, shape[0] // math.prod(dealt), *shape[1:])
        return self._reshaped(node, self.build.value[x], sizes)

    def _reshaped(self, node: fx.Node, x: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        return self.build.infer(aten.reshape.default, x, list(sizes), like=record(node), name=node.name)

    def _divisor(self, node: fx.Node) -> int | float:
        """What a sum over a group is divided by: the number of its elements, or one less."""
        (total,), divisor = operand_nodes(node), node.args[1]
        if total.target is not aten.sum.dim_IntList:
            return divisor  # type: ignore[return-value]
        known = self.build.value[total]
        old, new = (_elements(operand_nodes(one)[0]) // _elements(one) for one in (total, known))
        if divisor == old - 1 and new == 1:
            raise BatchError(
                f"batch_statistics: {name_of(node)} has 1 value per channel in each of {old} groups of samples, of "
                f"which there is no variance. Use fewer micro-batches or data ranks, or a batch with larger parts "
                f"(drop_last=True leaves out the last one of an epoch)."
            )
        return divisor + new - old  # type: ignore[operator, return-value]

    # -- running statistics ---------------------------------------------------------------------------------------

    def _average(self, node: fx.Node) -> fx.Node:
        """The running statistic after all micro-batches of each rank, one after another, of which ranks take the mean.

        Exponential: r = q r + m s for each update, q = 1 - m. Where a module runs several times in a forward pass, call
        j of micro-batch i comes before call j + 1, and that before call j of micro-batch i + 1. So with Q the product
        of the q of all calls, call j makes r = q r + m sum_i Q^(u-1-i) s_i, and the first one r = q Q^(u-1) r + ...
        """
        running, values, *count = operand_nodes(node)
        old, stats = self.build.value[running], self.build.value[values]
        known, kept = record(stats).type, record(node)
        groups = known.shape[1]
        if count:
            return self._mean_of_all(node, self.build.value[count[0]], self.updates / groups)
        momentum: Any = node.args[3]
        chain = self._chain(node)
        momenta: list[Any] = [one.args[3] for one in chain]
        q_all = math.prod(1 - one for one in momenta)
        weights = [momentum * q_all ** (self.updates - 1 - i) for i in range(self.updates)]
        factor = (1 - momentum) * (q_all ** (self.updates - 1) if chain[0] is node else 1)
        if groups % self.updates or self.updates == 1:  # all updates have the same values
            values = self._call(aten.mul.Tensor, self._over_groups(stats, kept), sum(weights) / groups, like=kept)
        else:
            ranks = groups // self.updates
            values = self._over_groups(self._weighted(stats, momentum / ranks, q_all, kept), kept)
        return self._written(node, self._call(aten.mul.Tensor, old, factor, like=kept), values)

    def _mean_of_all(self, node: fx.Node, count: fx.Node, share: float) -> fx.Node:
        """r = ((count - u) r + sum of u values) / count."""
        old, kept = self.build.value[operand_nodes(node)[0]], record(node)
        total = self._call(aten._to_copy.default, count, like=kept, dtype=kept.type.dtype)
        before = self._call(aten.sub.Tensor, total, self.updates, like=kept)
        values = self._over_groups(self.build.value[operand_nodes(node)[1]], kept)
        values = self._call(aten.mul.Tensor, values, share, like=kept)
        old, values = (
            self._call(aten.div.Tensor, one, total, like=kept)
            for one in (self._call(aten.mul.Tensor, old, before, like=kept), values)
        )
        return self._written(node, old, values)

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """All updates of a statistic in a forward pass, first to last."""
        after = {operand_nodes(one)[0]: one for one in self.averages}
        first = node
        while operand_nodes(first)[0].target is AVERAGE:
            first = operand_nodes(first)[0]
        chain = [first]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        return chain

    def _weighted(self, stats: fx.Node, momentum: float, factor: float, like: Any) -> fx.Node:
        """The values of the micro-batches of ranks times the weight of each, which has a factor for each one behind."""
        call, count, known = partial(self._call, like=like), self.updates, record(stats).type
        behind = call(aten.arange.start_step, count - 1, -1, -1, dtype=known.dtype)
        weight = call(aten.mul.Tensor, call(aten.pow.Scalar, factor, behind), momentum)
        weight = call(aten.expand.default, weight, [known.shape[1] // count, count])
        shape = [known.shape[1] if dim == 1 else 1 for dim in range(len(known.shape))]
        return call(aten.mul.Tensor, stats, call(aten.reshape.default, weight, shape))

    def _over_groups(self, stats: fx.Node, like: Any) -> fx.Node:
        dims = [dim for dim in range(len(record(stats).type.shape)) if dim != _CHANNEL]
        return self._call(aten.sum.dim_IntList, stats, dims, like=like)

    def _written(self, node: fx.Node, old: fx.Node, values: fx.Node) -> fx.Node:
        made = self._call(aten.add.Tensor, old, values, like=record(node))
        dtype = record(node).type.dtype
        return made if record(made).type.dtype == dtype else self._call(
            aten._to_copy.default, made, like=record(node), dtype=dtype
        )  # fmt: skip

    def _call(self, target: Any, *args: Any, like: Any, **kwargs: Any) -> fx.Node:
        return self.build.infer(target, *args, like=like, **kwargs)


def _elements(node: fx.Node) -> int:
    return record(node).type.numel
