"""Find when the values of a graph die and which may be overwritten: liveness over values that may share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.ir.ops.op_facts import is_fresh, is_whole_view
from autopar.ir.ops.ops import op
from autopar.ir.program import is_getitem

_WAIT = op("wait")
_EARLIER = op("earlier")


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """`dying[n]`: the values whose last use is node n. Sharing sets are named by one of their nodes."""

    dying: dict[fx.Node, tuple[fx.Node, ...]]
    position: dict[fx.Node, int]
    share: dict[fx.Node, fx.Node]
    share_last: dict[fx.Node, int]
    foreign: frozenset[fx.Node]  # sharing sets with a value that the graph was given and that is not its own

    def may_overwrite(self, value: fx.Node, node: fx.Node) -> bool:
        """True if `node`, an operand of which is `value`, may write over it: nothing looks at this memory again."""
        share = self.share[value]
        if share in self.foreign or self.share_last[share] > self.position[node]:
            return False
        sharing = [arg for arg in node.all_input_nodes if self.share[arg] is share]
        return sharing == [value]  # another operand may be a view of it


def lifetimes(graph: fx.Graph, given: Collection[fx.Node] = ()) -> Lifetimes:
    """Liveness of every value; a value that nobody uses dies where it is made.

    given: the placeholders whose memory is the graph's own from then on. Whoever runs it looks at it no more.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    share: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        share[node] = node
        if node.op in ("placeholder", "get_attr") or is_own(node):
            continue
        for arg in node.all_input_nodes:
            _join(share, node, arg)
    share = {node: _find(share, node) for node in nodes}
    share_last: dict[fx.Node, int] = defaultdict(int)
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        last = max((position[user] for user in node.users), default=position[node])
        share_last[share[node]] = max(share_last[share[node]], last)
        if node.op != "output" and nodes[last].op != "output":
            dying[nodes[last]].append(node)
    _extend_to_waits(nodes, position, share, share_last)
    for node in nodes:
        if node.target is _EARLIER:  # kept for the slices to come
            share_last[share[node.args[0]]] = len(nodes)  # type: ignore[index]
    foreign = frozenset(share[node] for node in nodes if node.op in ("placeholder", "get_attr") and node not in given)
    return Lifetimes({node: tuple(dead) for node, dead in dying.items()}, position, share, dict(share_last), foreign)


def _extend_to_waits(
    nodes: list[fx.Node], position: dict[fx.Node, int], share: dict[fx.Node, fx.Node], share_last: dict[fx.Node, int]
) -> None:
    """Until it is awaited, a collective reads what it was started with, if that is not its own from then on."""
    for node in nodes:
        if node.target is _WAIT:
            (start,) = node.all_input_nodes
            for operand in start.all_input_nodes:
                if share_last[share[operand]] > position[start]:
                    share_last[share[operand]] = max(share_last[share[operand]], position[node])


def is_own(node: fx.Node) -> bool:
    """True if the value of a node is known to share no memory with the node's operands."""
    if node.op == "output":
        return True  # it returns the values, and no node comes after it
    if is_getitem(node):
        producer = node.args[0]
        return isinstance(producer, fx.Node) and is_fresh(producer.target)
    return is_fresh(node.target)


def is_dense(node: fx.Node) -> bool:
    """True if a value is what an op made, or a view of that in which no element stands twice: it may be written to.

    So is a placeholder that may be overwritten at all.
    """
    while is_whole_view(node.target):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node.op == "placeholder" or (node.op == "call_function" and is_own(node))


def _find(share: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while share[node] is not node:
        share[node] = share[share[node]]
        node = share[node]
    return node


def _join(share: dict[fx.Node, fx.Node], a: fx.Node, b: fx.Node) -> None:
    share[_find(share, a)] = _find(share, b)
