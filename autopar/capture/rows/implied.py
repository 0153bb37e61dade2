"""Know of a loop through the places of a mask that what it selects there is nothing where the mask is False.

`for e in (hot.sum((1, 2)) > 0).nonzero(): where(hot[e])`: the mask says of each place whether any element is not zero.
Then the rows of a turn are those of `hot[e]` alone, and nothing that all samples decide stands before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_view, keeps_zeros
from autopar.ir.ops.ops import op_name

aten = torch.ops.aten
_Slice = tuple[fx.Node, int, int]  # a tensor, and how often it was written; a dim
_WHOLE = ("view", "reshape", "_unsafe_view", "flatten")  # views that may keep their first dim


def is_implied(mask: fx.Node, place: int, condition: fx.Node) -> bool:
    """True if a condition holds nowhere where a mask [n] is False at a place."""
    counted = _counted(mask)
    return counted is not None and (*counted, place) == _taken(condition)


def _counted(node: fx.Node) -> _Slice | None:
    """The tensor and its dim, of which a mask says where any element is not zero."""
    node = _bare(node)
    if node.op != "call_function" or op_name(node.target) not in ("any", "sum") or len(node.args) < 2:
        return None
    operand, dims = node.args[:2]
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if not isinstance(operand, fx.Node) or keeps or dims is None:
        return None
    count = operand.meta["val"].ndim
    gone = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}  # type: ignore[operator, union-attr]
    left = [dim for dim in range(count) if dim not in gone]
    if len(left) != 1 or (op_name(node.target) == "sum" and not _is_positive(operand)):
        return None
    return _source(operand, left[0])


def _taken(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """The tensor, its dim and the place along it that a condition is all of, or views of that."""
    while True:
        node = _bare(node)
        args: Any = node.args
        if node.op != "call_function" or not is_view(node.target):
            return None
        if node.target is aten.select.int:
            return (*_source(args[0], args[1]), args[2])
        if node.target is aten.slice.Tensor:
            of, dim, start, end = args[:4]
            return (*_source(of, dim), start) if len(args) == 4 and end == start + 1 else None
        node = args[0]


def _bare(node: fx.Node) -> fx.Node:
    """A tensor without casts, copies and comparisons with zero, behind which the same elements are zero."""
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        operand, number = node.args[0], node.args[1] if len(node.args) > 1 else None
        before, after = _dtype(operand), _dtype(node)
        if (
            before is None
            or after is None
            or not keeps_zeros(node.target, before, after, number, _is_positive(operand))
        ):
            break
        node = operand
    return node


def _is_positive(node: Any) -> bool:
    """True if no element is below zero: what was a truth, and sums and products of such."""
    if not isinstance(node, fx.Node):
        return False
    dtype, operand = _dtype(node), next(iter(node.all_input_nodes), None)
    if dtype is torch.bool or node.op != "call_function" or operand is None:
        return dtype is torch.bool
    name = op_name(node.target)
    if name in ("mul", "sum"):
        return all(_is_positive(one) for one in node.args[: len(node.all_input_nodes)])
    before = _dtype(operand)
    is_kept = before is not None and dtype is not None and keeps_zeros(node.target, before, dtype, None, False)
    return (is_view(node.target) or is_kept) and _is_positive(operand)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a tensor; None of what gives several."""
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else None


def _source(node: fx.Node, dim: int) -> _Slice:
    """What a tensor shows, if it shows a dim of that whole in front."""
    node, dim = _bare(node), dim % node.meta["val"].ndim
    while node.op == "call_function" and dim == 0 and op_name(node.target) in _WHOLE:
        before: Any = node.args[0]
        if not before.meta["val"].ndim or before.meta["val"].shape[0] != node.meta["val"].shape[0]:
            break
        node = _bare(before)
    return node, getattr(node.meta["val"], "_version", 0), dim
