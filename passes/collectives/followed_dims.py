"""Which dims the elements of a value were in before, through calls that only put them elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of
from autopar.ir.program import record

Part = tuple[str, int]  # a dim that was there before, by name, and its size
Dims = list[list[Part]]  # of each dim of a value the parts, major to minor; none of those of size 1


def parts_of(dims: Sequence[Sequence[Part]]) -> Dims:
    """Dims as they are followed."""
    return [[part for part in dim if part[1] != 1] for dim in dims]


def moves_only(node: fx.Node) -> bool:
    """Whether a call gives every element of its operand once, as it is."""
    moves = facts_of(node.target).moves
    return moves in ("flat", "turned") or (
        moves == "repeated" and record(node).type.numel == math.prod(_shape_before(node))
    )


def followed(dims: Dims, node: fx.Node) -> Dims | None:
    """The parts of each dim of what a call gives that `moves_only`; None if it takes one of them apart. dims: of its
    operand."""
    if facts_of(node.target).moves == "turned":
        return [dims[dim] for dim in _order(node)]
    left, made = [part for dim in dims for part in dim], Dims()
    for size in record(node).type.shape:
        taken = 1
        made.append([])
        while taken < size:
            made[-1].append(left.pop(0))
            taken *= made[-1][-1][1]
        if taken != size:
            return None
    return made


def _shape_before(node: fx.Node) -> tuple[int, ...]:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return record(operand).type.shape


def _order(node: fx.Node) -> list[int]:
    """The dims of its operand in the order in which a call gives them, as a tensor of unlike strides tells."""
    shape = _shape_before(node)
    x = torch.empty_strided(shape, tuple(range(1, len(shape) + 1)), device="meta")
    turned: torch.Tensor = node.target(x, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [stride - 1 for stride in turned.stride()]
