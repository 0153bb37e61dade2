"""The rows of all experts of a loop, each once for every expert that it may have, and the expert of each."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_view
from autopar.ir.ops.ops import NO_EXPERT, op
from autopar.ir.program import Builder, Record, record
from autopar.passes.sorts.loop_bodies import Apart
from autopar.passes.sorts.loop_masks import Loop
from autopar.passes.sorts.loop_stacks import Stacks, shaped

aten = torch.ops.aten


class LoopRows:
    """Rows of a loop. rows: of a mask; chosen: experts of one; size: of all. index: the expert of each, NO_EXPERT for
    one that has none; place: the same, with any expert for such a row."""

    def __init__(self, loop: Loop, build: Builder, stacks: Stacks) -> None:
        self.loop, self.build, self.stacks = loop, build, stacks
        self.count, self.chosen, self.rows = len(loop.masks), loop.chosen, loop.rows
        self.size = self.rows * self.chosen
        self.turn = _turn(loop.first)
        self.index: fx.Node = loop.first  # until `start`
        self.place = self.index
        self._places: fx.Node | None = None

    def start(self, like: Record) -> fx.Node | None:
        """Compute the expert of each row, and give which rows have one; None if all do."""
        hot = self.loop.hot
        is_whole = hot is not None and hot.is_whole
        if hot is not None:
            place, valid = (self.turned(one, 0, like) for one in self._of_hot(like))
        else:
            place, valid = self._of_masks(like)
        self.place = self.index = place
        if is_whole:
            return None
        nobody = self.build.infer(aten.full.default, [], NO_EXPERT, like=like, dtype=torch.int64)
        self.index = self.build.infer(aten.where.self, valid, place, nobody, like=like)
        return valid

    def _of_hot(self, like: Record) -> tuple[fx.Node, fx.Node]:
        """The experts and which rows have one, by the tensor that tells them."""
        hot, infer = self.loop.hot, self.build.infer
        assert hot is not None
        tensor = self.build.value[hot.tensor]
        if hot.dim is None:
            place = tensor
            if record(place).type.dtype != torch.int64:
                place = infer(aten._to_copy.default, tensor, like=like, dtype=torch.int64)
            valid = infer(aten.ge.Scalar, place, 0, like=like)
            below = infer(aten.lt.Scalar, place, self.count, like=like)
            valid = infer(aten.bitwise_and.Tensor, valid, below, like=like)
        else:
            most = infer(aten.max.dim, tensor, hot.dim, like=like)
            place = infer(operator.getitem, most, 1, like=like)
            valid = infer(aten.ne.Scalar, infer(operator.getitem, most, 0, like=like), 0, like=like)
        for call in hot.path:
            target: Any = call.target
            if is_view(target):
                place = infer(target, place, *call.args[1:], like=like)
                valid = infer(target, valid, *call.args[1:], like=like)
        return place, valid

    def _of_masks(self, like: Record) -> tuple[fx.Node, fx.Node]:
        """The experts of each row, as many as it may have, and which of them it has, by the masks of all."""
        infer = self.build.infer
        masks = [self.build.copy(masks[0]) for masks in self.loop.masks]
        columns = [infer(aten.unsqueeze.default, self.turned(mask, 0, like), 1, like=like) for mask in masks]
        table = infer(
            aten._to_copy.default, infer(aten.cat.default, columns, 1, like=like), like=like, dtype=torch.int32
        )
        if self.chosen == 1:
            most = infer(aten.max.dim, table, 1, like=like)
        else:
            most = infer(aten.topk.default, table, self.chosen, 1, like=like)
        valid, place = (infer(operator.getitem, most, i, like=like) for i in range(2))
        valid = infer(aten.ne.Scalar, valid, 0, like=like)
        flat = [self.size]
        return tuple(shaped(self.build, one, flat, like) for one in (place, valid))  # type: ignore[return-value]

    def repeated(self, node: fx.Node, dim: int, like: Record) -> fx.Node:
        """Rows, each as often as it may have experts."""
        node = self.turned(node, dim, like)
        if self.chosen == 1:
            return node
        shape = record(node).type.shape
        apart = self.build.infer(aten.unsqueeze.default, node, dim + 1, like=like)
        sizes = [*shape[: dim + 1], self.chosen, *shape[dim + 1 :]]
        apart = self.build.infer(aten.expand.default, apart, sizes, like=like)
        return shaped(self.build, apart, [*shape[:dim], shape[dim] * self.chosen, *shape[dim + 1 :]], like)

    def places(self, like: Record) -> fx.Node:
        """The place of each row in the mask, once."""
        if self._places is None:
            every = self.build.infer(aten.arange.start_step, 0, self.rows, like=like, dtype=torch.int64)
            self._places = self.repeated(every, 0, like)
        return self._places

    def turned(self, node: fx.Node, dim: int, like: Record, back: bool = False) -> fx.Node:
        """Rows of a mask [k, n] in the order of [n, k], in which those of a sample are beside each other; or back."""
        if self.turn is None:
            return node
        shape = record(node).type.shape
        sizes = [*shape[:dim], *(self.turn[::-1] if back else self.turn), *shape[dim + 1 :]]
        order = [*range(dim), dim + 1, dim, *range(dim + 2, len(sizes))]
        apart = shaped(self.build, node, sizes, like)
        return shaped(self.build, self.build.infer(aten.permute.default, apart, order, like=like), list(shape), like)

    def gathered(self, nodes: tuple[fx.Node, ...], dim: int, like: Record) -> fx.Node:
        """Choose, of rows that each expert has its own of, those of each row's experts."""
        stack, infer = self.stacks.of(nodes, like), self.build.infer
        shape = record(stack).type.shape
        if dim or math.prod(shape[2:]) != 1:
            raise Apart(f"each takes other rows at {like.source}")
        columns = infer(aten.permute.default, shaped(self.build, stack, list(shape[:2]), like), [1, 0], like=like)
        columns = self.turned(columns, 0, like)
        places = shaped(self.build, self.place, [self.rows, self.chosen], like)
        made = infer(aten.gather.default, columns, 1, places, like=like)
        return shaped(self.build, made, [self.size, *shape[2:]], like)

    def looked(self, nodes: tuple[fx.Node, ...], dim: int, ndim: int, like: Record) -> fx.Node:
        """What each row's expert adds, or multiplies by, in a tensor of so many dims with rows along one."""
        stack, infer = self.stacks.of(nodes, like), self.build.infer
        shape = record(stack).type.shape[1:]
        behind = ndim - 1 - dim
        if len(shape) > behind and math.prod(shape[: len(shape) - behind]) != 1:
            raise Apart(f"what each adds at {like.source} has other dims")
        kept = shape[max(0, len(shape) - behind) :]
        table = shaped(self.build, stack, [self.count, math.prod(kept)], like)
        rows = infer(op("embedding"), table, self.index, like=like)
        sizes = [self.size, *(1,) * (behind - len(kept)), *kept]
        return shaped(self.build, rows, sizes, like)


def _turn(mask: fx.Node) -> tuple[int, int] | None:
    """The sizes [k, n] of what a mask is a row of, where it has more columns: a row of each sample's choices."""
    source = mask.args[0] if is_view(mask.target) else None
    shape = record(source).type.shape if isinstance(source, fx.Node) else ()
    return (shape[0], shape[1]) if len(shape) == 2 and 1 < shape[0] < shape[1] else None
