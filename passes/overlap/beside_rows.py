"""beside_rows: what stands beside the experts of a layer, a shared expert, is computed while rows go to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopar.ir.ops.ops import collective_of, is_collective
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, record
from autopar.passes.overlap.overlap import is_product

MADE_BY = "beside_rows"


def beside_rows(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Products that neither need rows from their experts nor decide where these go stand behind the
    `dispatch` of their layer, so that `overlap` starts that before them and awaits it behind them.

        LOCAL program on ep=2
        %w: f32[4,4] [-,-] = parameter "w"
        %up: f32[2,4,4] of [4,4,4] [ep,-,-] = parameter "up"
        %x: f32[4,4] of [8,4] [ep,-] = batch "0"
        %index: i64[4] of [8] [ep] = aten.argmax.default(%x, 1)
        %order: i64[4] of [8] [ep] = autopar.order_by_owner.default(%index, "ep")
        %route: i64[4,2] of [8,2] [ep,-] = autopar.route.default(%index, "ep", 4)
        %here: i64[4] of [8] [@ep] = autopar.owned_index.default(%index, "ep", %route)
        %coord: - ? = autopar.coord.default("ep")
        %offset: - ? = operator.mul(%coord, 2)
        %dispatch: f32[4,4] of [8,4] [@ep,-] = autopar.dispatch.default(%x, "ep", %order, %route)
        %expert_mm: f32[4,4] of [8,4] [@ep,-] = autopar.expert_mm.default(%dispatch, %up, %here, offset=%offset)
        %combine: f32[4,4] of [8,4] [ep,-] = autopar.combine.default(%expert_mm, "ep", %order, %route)
        %einsum: f32[4,4] of [8,4] [ep,-] = autopar.einsum.default(%x, %w, "ca,ab->cb")
        %add: f32[4,4] of [8,4] [ep,-] = aten.add.Tensor(%combine, %einsum)
        %sum_1: f32[] [] partial(ep) = aten.sum.default(%add)
        %all_reduce: f32[] [] = autopar.all_reduce.default(%sum_1, "ep", "sum")
        return loss "loss" = %all_reduce
    becomes
        LOCAL program on ep=2
        %w: f32[4,4] [-,-] = parameter "w"
        %up: f32[2,4,4] of [4,4,4] [ep,-,-] = parameter "up"
        %x: f32[4,4] of [8,4] [ep,-] = batch "0"
        %index: i64[4] of [8] [ep] = aten.argmax.default(%x, 1)
        %order: i64[4] of [8] [ep] = autopar.order_by_owner.default(%index, "ep")
        %route: i64[4,2] of [8,2] [ep,-] = autopar.route.default(%index, "ep", 4)
        %dispatch: f32[4,4] of [8,4] [@ep,-] = autopar.dispatch.default(%x, "ep", %order, %route)
        %here: i64[4] of [8] [@ep] = autopar.owned_index.default(%index, "ep", %route)
        %coord: - ? = autopar.coord.default("ep")
        %offset: - ? = operator.mul(%coord, 2)
        %einsum: f32[4,4] of [8,4] [ep,-] = autopar.einsum.default(%x, %w, "ca,ab->cb")
        %expert_mm: f32[4,4] of [8,4] [@ep,-] = autopar.expert_mm.default(%dispatch, %up, %here, offset=%offset)
        %combine: f32[4,4] of [8,4] [ep,-] = autopar.combine.default(%expert_mm, "ep", %order, %route)
        %add: f32[4,4] of [8,4] [ep,-] = aten.add.Tensor(%combine, %einsum)
        %sum_1: f32[] [] partial(ep) = aten.sum.default(%add)
        %all_reduce: f32[] [] = autopar.all_reduce.default(%sum_1, "ep", "sum")
        return loss "loss" = %all_reduce

    In the forward pass alone: in the backward pass gradients of weights wait for this (`overlap`).
    """
    moved = _beside(program.nodes)
    if not moved:
        return program
    build, late = Builder(MADE_BY), {node for found in moved.values() for node in found}

    def put(node: fx.Node) -> fx.Node | None:
        if node not in moved:
            return None
        made = build.copy(node)
        for one in moved[node]:
            build.copy(one)
        return made

    return build.rewrite(program, put, later=late)


def _beside(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What may be computed while rows go, by the call that sends them, where that is a product."""
    sends = [i for i, node in enumerate(nodes) if _sends_rows(node)]
    position = {node: i for i, node in enumerate(nodes)} if sends else {}
    moved: dict[fx.Node, list[fx.Node]] = {}
    for at, before, after in zip(sends, [-1, *sends], [*sends[1:], len(nodes)], strict=False):
        found = [*_earlier(nodes, position, before + 1, at), *_later(nodes, position, at, after)]
        if any(map(is_product, found)):
            moved[nodes[at]] = found
    return moved


def _earlier(nodes: Sequence[fx.Node], position: dict[fx.Node, int], first: int, at: int) -> list[fx.Node]:
    """The calls before a place that nothing up to it reads."""
    found: list[fx.Node] = []
    known: set[fx.Node] = set()
    for node in reversed(nodes[first:at]):
        is_movable = _is_forward_call(node) and not is_collective(node.target)
        if is_movable and all(user in known or position.get(user, len(nodes)) > at for user in node.users):
            found.append(node)
            known.add(node)
    return found[::-1]


def _later(nodes: Sequence[fx.Node], position: dict[fx.Node, int], at: int, end: int) -> list[fx.Node]:
    """The calls behind a place that hang on nothing behind it, and meet what does."""
    behind, met = {nodes[at]}, list[fx.Node]()
    for node in nodes[at + 1 : end]:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            met += [one for one in node.all_input_nodes if one not in behind and position[one] > at]
    needed: set[fx.Node] = set()
    while met:
        node = met.pop()
        if node not in needed and position[node] > at:
            needed.add(node)
            met += node.all_input_nodes
    found: set[fx.Node] = set()
    for node in nodes[at + 1 : end]:
        is_free = all(position[one] < at or one in found for one in node.all_input_nodes)
        if node in needed and is_free and _is_forward_call(node) and not is_collective(node.target):
            found.add(node)
    return [node for node in nodes[at + 1 : end] if node in found]


def _sends_rows(node: fx.Node) -> bool:
    is_known = node.op == "call_function" and is_collective(node.target)
    if not (is_known and _is_forward_call(node) and getattr(collective_of(node.target), "owned", None)):
        return False
    return math.prod(record(node).type.shape[1:]) > 1  # a number a row hides nothing


def _is_forward_call(node: fx.Node) -> bool:
    return node.op == "call_function" and not record(node).is_backward
