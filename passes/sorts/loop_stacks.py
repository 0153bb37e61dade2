"""What each expert of a loop has one of, along a new first dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, is_view
from autopar.ir.program import Builder, Record, operand_nodes, record
from autopar.passes.sorts.loop_bodies import Apart

aten = torch.ops.aten


class Stacks:
    """Values of all experts, put together. A piece of a parameter that has them all is that parameter. given: what
    the loops of a program give for each of their experts, which another loop with the same experts adds to its own."""

    def __init__(self, build: Builder, count: int, given: dict[tuple[fx.Node, ...], fx.Node]) -> None:
        self.build, self.count, self.given = build, count, given
        self._stacks: dict[tuple[fx.Node, ...], fx.Node] = {}

    def of(self, nodes: tuple[fx.Node, ...], like: Record) -> fx.Node:
        """Values of all experts along a new first dim; where these are pieces of one tensor, or shown alike, that."""
        if nodes not in self._stacks:
            self._stacks[nodes] = self._stacked(nodes, like.with_(phase=record(nodes[0]).phase))
        return self._stacks[nodes]

    def _stacked(self, nodes: tuple[fx.Node, ...], like: Record) -> fx.Node:
        if nodes in self.given:
            return self.given[nodes]
        first = nodes[0]
        is_alike = all(node.target is first.target and node.op == first.op == "call_function" for node in nodes)
        if is_alike and first.target is aten.select.int:
            tensor, dim = first.args[:2]
            sizes = record(tensor).type.shape  # type: ignore[arg-type]
            wanted = [(tensor, dim, i) for i in range(len(nodes))]
            if [node.args for node in nodes] == wanted and sizes[dim] == len(nodes):  # type: ignore[index]
                order = [dim % len(sizes), *(i for i in range(len(sizes)) if i != dim % len(sizes))]  # type: ignore[operator]
                whole = self.build.value[tensor]  # type: ignore[index]
                return whole if order[0] == 0 else self.build.infer(aten.permute.default, whole, order, like=like)
        is_alike = is_alike and len({repr((node.args[1:], node.kwargs)) for node in nodes}) == 1
        if is_alike and len(operand_nodes(first)) == 1 and _may_batch(first):
            below = tuple(node.all_input_nodes[0] for node in nodes)
            return self.batched(first, {below[0]: self.of(below, like)}, like)
        if any(one not in self.build.value for one in nodes):
            raise Apart(f"what another loop gives is taken with it at {like.source}")
        pieces = [self.build.infer(aten.unsqueeze.default, self.build.value[one], 0, like=like) for one in nodes]
        return self.build.infer(aten.cat.default, pieces, 0, like=like)

    def batched(self, node: fx.Node, new: dict[fx.Node, fx.Node], like: Record) -> fx.Node:
        """A call for a new first dim of its operands."""
        infer, shape = self.build.infer, record(node).type.shape
        if node.target in _TURNS:
            (stack,) = new.values()
            order = _TURNS[node.target](len(shape), *node.args[1:])
            return infer(aten.permute.default, stack, [0, *(dim + 1 for dim in order)], like=like)
        if is_view(node.target) and math.prod(shape) == math.prod(record(operand_nodes(node)[0]).type.shape):
            (stack,) = new.values()
            return shaped(self.build, stack, [self.count, *shape], like)
        are_alike = all(record(one).type.shape == shape for one in new)
        if facts_of(node.target).pointwise and are_alike:
            given: Any = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
            target: Any = node.target
            return infer(target, *given[0], like=like, **given[1])
        raise Apart(f"{node.target} at {like.source} takes what each has")


def shaped(build: Builder, node: fx.Node, sizes: Sequence[int], like: Record) -> fx.Node:
    """A value of another shape, if neither it nor what it is made of has that one."""
    while node.target is aten.reshape.default:
        (node,) = node.all_input_nodes
    if record(node).type.shape == tuple(sizes):
        return node
    return build.infer(aten.reshape.default, node, list(sizes), like=like)


def _may_batch(node: fx.Node) -> bool:
    if node.target in _TURNS:
        return True
    same = math.prod(record(node).type.shape) == math.prod(record(node.all_input_nodes[0]).type.shape)
    return same and (is_view(node.target) or facts_of(node.target).pointwise)


def _transposed(ndim: int, a: int = 0, b: int = -1) -> list[int]:
    order = list(range(ndim))
    if ndim:
        order[a], order[b] = order[b], order[a]
    return order


_TURNS: dict[Any, Any] = {
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.permute.default: lambda ndim, dims: [dim % ndim for dim in dims],
}
