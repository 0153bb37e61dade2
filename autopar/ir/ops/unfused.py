"""A graph without its groups, and over which operands a group may write its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.fusible import fusible
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.storage import is_view
from autopar.ir.program import is_getitem, record, set_record


@dataclass(frozen=True, slots=True)
class Unfused:
    """A graph with the bodies of its groups in place of these. became: its node for each of the program's; a group has
    no value of its own there, its results have. home: the node of the program that each of its nodes is of."""

    graph: fx.Graph
    became: Mapping[fx.Node, fx.Node]
    home: Mapping[fx.Node, fx.Node]


def unfused(graph: fx.Graph) -> Unfused:
    """A graph without its groups; the graph itself if it has none."""
    value: dict[fx.Node, Any] = {}
    same = {node: node for node in graph.nodes}
    if not any(isinstance(node.target, Fused) for node in graph.nodes):
        return Unfused(graph, same, same)
    plain = fx.Graph()
    names, home = {node.name for node in graph.nodes}, dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        fused, source = fused_of(node), node.args[0] if is_getitem(node) else None
        if fused is not None:
            body = _copy_body(fused, [value[operand] for operand in node.args], plain, names)  # type: ignore[index]
            home.update(dict.fromkeys((body[call] for call in fused.calls), node))
            value[node] = tuple(body[result] for result in fused.results)
        elif isinstance(source, fx.Node) and isinstance(source.target, Fused):
            value[node] = value[source][node.args[1]]
        else:
            value[node] = plain.node_copy(node, value.__getitem__)
            home[value[node]] = node
    return Unfused(plain, {node: made for node, made in value.items() if isinstance(made, fx.Node)}, home)


def _copy_body(
    fused: Fused, operands: list[fx.Node], graph: fx.Graph, names: set[str]
) -> dict[fx.Node, fx.Node]:  # fmt: skip
    """Copy the calls of a group under their own names; what another group computes too gets one of its own."""
    value = dict(zip(fused.placeholders, operands, strict=True))
    for node in fused.calls:
        name = node.name if node in fused.results or node.name not in names else f"{node.name}_again"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value.__getitem__)
        value[node] = graph.create_node("call_function", node.target, args, kwargs, name=name)
        set_record(value[node], record(node))
        names.add(name)
    return value


def in_place(fused: Fused) -> tuple[tuple[int, ...], ...]:
    """For each result the operands over which it may be written: of its type, and read only where it is written."""
    return tuple(
        tuple(place for place, operand in enumerate(fused.placeholders) if _may_take(fused, result, operand))
        for result in fused.results
    )


def _may_take(fused: Fused, result: fx.Node, operand: fx.Node) -> bool:
    mine, its = record(result), record(operand)
    if not its.is_tensor or mine.types != its.types or mine.layouts != its.layouts or is_view(result):
        return False
    shape = local_type(operand, fused.mesh).shape
    if len(shape) == 0 or math.prod(shape[:-1]) * shape[-1] == 0:
        return False
    return all(_reads_in_place(user, shape, fused.mesh) for user in operand.users if user.op != "output")


def _reads_in_place(user: fx.Node, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """True if a call reads each element where its own lies, or along its row."""
    how = fusible(user, mesh)
    if how is None or how.kind == "view":
        return False
    return how.width > 0 or local_type(user, mesh).shape == shape
