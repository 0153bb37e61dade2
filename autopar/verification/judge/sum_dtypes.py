"""The sums of gradients over ranks and micro-batches, in the dtype that was asked for.

Under a precision the tolerance is a rounding of the short float, which a sum in the wrong dtype stays within. So the
programs themselves are read: from each gradient that leaves, back through all that computes nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.compiler.lowered import Lowered
from autopar.ir.ops.names import dtype_name
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.ops.storage import is_view
from autopar.ir.program import CAST, Program, is_getitem, operand_nodes, record

_aten = torch.ops.aten
# What brings a gradient, or a term of it, to its place: beside views and collectives.
_MOVES = frozenset(
    [CAST, op("shard"), op("keep_first"), _aten.add.Tensor, _aten.cat.default, _aten.constant_pad_nd.default]
)


def sums_of_gradients(program: Program) -> list[fx.Node]:
    """The collectives that add up gradients over an axis, of ranks or micro-batches: read by nothing but gradients."""
    leaving = {node for node, out in program.leaving if node is not None and out.kind == "gradient"}
    output = program.graph.output_node()
    inside: set[fx.Node] = set()
    for node in reversed(program.nodes):
        to_gradients = bool(node.users) and all(user in inside or user is output for user in node.users)
        if to_gradients and (output not in node.users or node in leaving) and _moves(node):
            inside.add(node)
    return [node for node in program.nodes if node in inside and _is_sum(node)]


def wrong_sums(compiled: Lowered) -> tuple[str, ...]:
    """A line for each sum of gradients in another dtype than `reduce_dtype`, if anything was asked of it."""
    options = compiled.plan.options
    if options.sums_dtype is None:
        return ()
    asked, wrong_sums = options.reduce_dtype, []
    for node in sums_of_gradients(compiled.program):
        dtype = record(operand_nodes(node)[0]).type.dtype
        if dtype.is_floating_point and dtype != asked:
            where = record(node).module or "no module"
            wrong_sums.append(
                f"%{node.name} ({where}) sums gradients over '{node.args[1]}' in {dtype_name(dtype)}, but "
                f"reduce_dtype is {dtype_name(asked)}"
            )
    return tuple(wrong_sums)


def _moves(node: fx.Node) -> bool:
    return is_collective(node.target) or node.target in _MOVES or is_getitem(node) or is_view(node)


def _is_sum(node: fx.Node) -> bool:
    return is_collective(node.target) and node.args[-1] == "sum"
