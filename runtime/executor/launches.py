"""Find the gathers of a graph that start together: one launch for the parameters of a layer.

NCCL moves what is launched together side by side, without the copies that a flat buffer takes.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.ops.ring_ops import is_ring

_GATHER = op("all_gather_start")


def joined(graph: fx.Graph) -> frozenset[fx.Node]:
    """The starts of gathers that may wait for the next start, which is over the same axis: what stands between makes
    only the operand of that one (a cast of a parameter)."""
    found: set[fx.Node] = set()
    last: fx.Node | None = None
    between: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _GATHER:
            if last is not None and _axis(node) == _axis(last) and _feeds(between, node):
                found.add(last)
            last, between = node, set()
        elif is_mesh_op(node.target) or is_ring(node.target):
            last = None
        elif node.op == "call_function":
            between.add(node)
    return frozenset(found)


def _axis(node: fx.Node) -> object:
    return node.args[1] if len(node.args) > 1 else node.kwargs["axis"]


def _feeds(nodes: set[fx.Node], target: fx.Node) -> bool:
    return all(user in nodes or user is target for node in nodes for user in node.users)
