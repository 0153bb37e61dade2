"""The sum that a gradient of a weight with several uses is: its terms, and what happens to it on its way out."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.ops.storage import is_view
from autopar.ir.program import CAST, record
from autopar.passes.pipeline.cuts.when import is_join

ADD, PAD = torch.ops.aten.add.Tensor, torch.ops.aten.constant_pad_nd.default
MOVES = (op("all_gather"), op("all_to_all"), op("shard"), op("keep_first"))


def sums_of(node: fx.Node) -> set[fx.Node]:
    """The sums of terms, that nothing but a join and one another reads, maybe step by step."""
    total = start_of(node)
    return {total}.union(*map(sums_of, total.all_input_nodes)) if is_sum(total) else set()


def steps_behind(node: fx.Node) -> list[fx.Node]:
    """What happens to one value alone and happens to a sum as it does to its terms, the last first."""
    steps_behind = []
    while _is_linear(node) and len(node.users) == 1:
        steps_behind.append(node)
        node = node.all_input_nodes[0]
    return steps_behind


def start_of(node: fx.Node) -> fx.Node:
    """The value that a row of such steps begins with."""
    steps = steps_behind(node)
    return steps[-1].all_input_nodes[0] if steps else node


def paths_to_terms(node: fx.Node, late: Container[fx.Node]) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The terms of sums, each with the steps that come between it and a join, the last first."""
    steps = tuple(steps_behind(node))
    total = start_of(node)
    if total not in late:
        yield node, ()
        return
    for arg in total.all_input_nodes:
        for term, more in paths_to_terms(arg, late):
            yield term, (*steps, *more)


def is_sum(node: fx.Node) -> bool:
    if node.target is not ADD or node.kwargs or len(node.users) != 1 or len(node.all_input_nodes) != 2:
        return False
    return all(record(arg).types == record(node).types for arg in node.all_input_nodes)


def _is_linear(node: fx.Node) -> bool:
    """True for a call of one value that gives of a sum what it gives of the terms, added up."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or is_join(node):
        return False
    if node.target in (op("all_reduce"), op("reduce_scatter")):
        return node.args[-1] == "sum"
    if node.target is CAST:  # the sum of terms that were widened is the better one
        source, made = record(node.all_input_nodes[0]).type.dtype, record(node).type.dtype
        return source.is_floating_point and made.is_floating_point and made.itemsize >= source.itemsize
    return node.target in MOVES or (node.target is PAD and len(node.args) == 2) or is_view(node)
