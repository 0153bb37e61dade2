"""Know of a loop through the places of a mask that what it selects there is nothing where the mask is False.

`for e in (hot.sum((1, 2)) > 0).nonzero(): where(hot[e])`: the mask says of each place whether any element is not zero.
Then the rows of a turn are those of `hot[e]` alone, and nothing that all samples decide stands before them. So it is of
`where(chosen == e)` behind `if bincount(chosen)[e] == 0: continue`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_check, is_view, keeps_zeros
from autopar.ir.ops.ops import op_name

aten = torch.ops.aten
_Slice = tuple[fx.Node, int, int]  # a tensor, and how often it was written; a dim
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_WHOLE = ("view", "reshape", "_unsafe_view", "flatten")  # views that may keep their first dim


def is_implied(mask: fx.Node, place: int | None, condition: fx.Node) -> bool:
    """True if a condition holds nowhere where a mask [n] is False, or a number zero, at a place; or (None) where no
    element of a mask is True."""
    if place is None:
        return _compared(mask) == (_compared(condition) or ())
    piece = _piece(condition)
    if piece is not None and piece[1] == place and _all_of(_bare(mask)) in piece[0]:
        return True
    counted, taken = _counted(mask), _taken(condition)
    if counted is not None and (*counted, place) == taken:
        return True
    numbers = _binned(mask) if counted is None else _numbers(counted)
    if numbers is None:
        return False
    return (*numbers, place) == (_compared(condition) if taken is None else _number(taken))


def count_asked(truth: fx.Node) -> tuple[fx.Node, int | None, bool] | None:
    """The numbers [n] of which a truth says whether the one at a place is zero, or the mask (with None) whether it has
    any place; and True for a truth that there is none."""
    is_none = truth.target is aten.eq.Scalar and bool(truth.args[1] == 0)
    node: Any = truth.args[0] if is_none else truth
    while True:
        node = _bare(node)
        if node.op != "call_function" or not isinstance(node.args[0], fx.Node):
            return None
        node = _later(node) or node
        of: Any = node.args[0]
        if op_name(node.target) in ("any", "sum") and _is_positive(of) and node.meta["val"].numel() == 1:
            return (of, None, is_none) if _compared(of) is not None else None
        if node.target is operator.getitem and of.target is aten.unbind.int:
            of = of.args[0]
        elif node.target is not aten.select.int:
            if not is_view(node.target) or of.meta["val"].numel() != 1:
                return None
            node = of
            continue
        place: Any = node.args[-1]
        return (of, place % len(of.meta["val"]), is_none) if of.meta["val"].ndim == 1 else None


def _later(node: fx.Node) -> fx.Node | None:
    """The end of a group, of which the end of the group before it is subtracted: how many rows it has."""
    operands = [one for one in node.args if isinstance(one, fx.Node)]
    if node.target is not aten.sub.Tensor or node.kwargs or len(operands) < 2:
        return None
    last, first = map(_bare, operands)
    if not (last.target is first.target is aten.select.int) or last.args[:2] != first.args[:2]:
        return None
    return last if last.args[2] == first.args[2] + 1 else None  # type: ignore[operator]


def _piece(condition: fx.Node) -> tuple[list[_Numbers], int] | None:
    """The ends of groups, or how many rows each has, and the group whose rows a condition holds for, as `segments.py`
    asks for a piece."""
    condition = _bare(condition)
    group: Any = condition.args[0] if condition.target is aten.eq.Scalar else condition
    while is_check(group.target):
        group = group.args[0]
    if group.op != "call_function" or op_name(group.target) != "searchsorted":
        return None
    ends: Any = _bare(group.args[0])
    counts = [ends.args[0]] if ends.op == "call_function" and op_name(ends.target) == "cumsum" else []
    return [_all_of(_bare(one)) for one in (ends, *counts)], condition.args[1]  # type: ignore[return-value]


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


_Numbers = tuple[fx.Node, int]  # a tensor, and how often it was written


def _binned(node: fx.Node) -> _Numbers | None:
    """The numbers of which each was counted: `zeros.index_add(0, numbers, ones)`."""
    numbers = _binned_by(_bare(node))
    return None if numbers is None else _all_of(numbers)


def _binned_by(node: fx.Node) -> fx.Node | None:
    """The index of such a call."""
    if node.op != "call_function" or op_name(node.target) != "index_add" or node.args[1] != 0:
        return None
    zeros, numbers, ones = (node.args[i] for i in (0, 2, 3))
    is_one = isinstance(ones, fx.Node) and ones.target in (aten.ones_like.default, aten.ones.default)
    is_zero = isinstance(zeros, fx.Node) and zeros.target in _ZEROS
    return numbers if is_one and is_zero else None  # type: ignore[return-value]


def _numbers(found: _Slice) -> _Numbers | None:
    """The numbers of a one-hot tensor, `numbers[..., None] == arange(n)`, along its last dim, or of one in which their
    places along a dim were set."""
    node, _, dim = found
    args: Any = node.args
    if _is_hot(node):
        return _all_of(args[2]) if args[1] % node.meta["val"].ndim == dim else None
    if node.target is not aten.eq.Tensor or dim != node.meta["val"].ndim - 1:
        return None
    return _all_of(args[0]) if args[1].target is aten.arange.default else None


def _is_hot(node: fx.Node) -> bool:
    """True for zeros of which some have a number above zero instead."""
    if node.target not in (aten.scatter.value, aten.scatter_.value):
        return False
    zeros, number = node.args[0], node.args[3]
    return isinstance(zeros, fx.Node) and zeros.target in _ZEROS and isinstance(number, (int, float)) and number > 0


def _number(taken: tuple[fx.Node, int, int, int]) -> tuple[fx.Node, int, int] | None:
    """The numbers and the one of which a piece of a one-hot tensor tells the places."""
    numbers = _numbers(taken[:3])
    return None if numbers is None else (*numbers, taken[3])


def _compared(node: fx.Node) -> tuple[fx.Node, int, Any] | None:
    """The numbers, and the one that any has where a condition holds: `numbers == e`, or any of some of these."""
    while True:
        node = _bare(node)
        args: Any = node.args
        if node.op != "call_function":
            return None
        if node.target is aten.eq.Scalar:
            return (*_all_of(args[0]), args[1])
        is_any = op_name(node.target) in ("any", "sum") and _is_positive(args[0])
        if not is_any and not is_view(node.target):
            return None
        node = args[0]


def _all_of(node: Any) -> _Numbers:
    """What a tensor shows all elements of."""
    while node.op == "call_function" and (is_view(node.target) or is_check(node.target)):
        before = node.args[0]
        if before.meta["val"].numel() != node.meta["val"].numel():
            break
        node = before
    return node, getattr(node.meta["val"], "_version", 0)


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
    if _is_hot(node) or _binned_by(node) is not None:
        return True
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
