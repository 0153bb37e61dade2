"""Which dim of a mask a dim of what it is computed from is, through views and broadcasts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.ir.ops.op_facts import is_view
from autopar.ir.ops.ops import op_name
from autopar.ir.program import record
from autopar.passes.rules import call_of, rule_of
from autopar.passes.rules.rule import Dims, Rule

# Of each dim of a tensor, the dim of the mask that it is: b, h, s or t; "" for one of size 1 that is none of them, "bh"
# for two that are joined.
Letters = tuple[str, ...]


def axes_of(shape: tuple[int, ...], letters: Letters) -> frozenset[str]:
    """The dims of the mask along which a tensor may differ."""
    return frozenset("".join(letter for size, letter in zip(shape, letters, strict=True) if size != 1))


def in_order(shape: tuple[int, ...], letters: Letters) -> list[int] | None:
    """The dims along which a tensor may differ, in the order of the mask's; None if joined dims have another one."""
    found = sorted((i for i, size in enumerate(shape) if size != 1), key=letters.__getitem__)
    told = "".join(letters[i] for i in found)
    return found if list(told) == sorted(told) else None


def under(node: fx.Node, letters: Letters, sizes: Mapping[str, int]) -> tuple[fx.Node, Letters] | None:
    """What a view or a broadcast shows, with the letters of its dims; None for other ops.

    The rule of the op says which dims of both are one: each name of the result has letters, and the operand's dims have
    the letters of their names. What the operand has and the result does not show (a row of many) has none.
    """
    stacked = _stacked(node)
    if stacked is not None:
        return stacked, letters
    x = node.args[0] if node.args else None
    shows = is_view(node.target) or op_name(node.target) == "repeat"
    if not isinstance(x, fx.Node) or not shows or not record(x).is_tensor or not record(node).is_tensor:
        return None
    pair = rule_of(call_of(node)) if record(x).type.dtype == record(node).type.dtype else None
    if pair is None:
        return None
    rule, of_name = pair[0], dict[str, str]()
    for dim, letter in zip(_larger(rule.results[0], rule), letters, strict=True):
        parts = [letter] if len(dim) == 1 else list(letter)
        if len(dim) > 1 and [rule.sizes[name] for name in dim] != [sizes[one] for one in parts]:
            return None  # dims of the mask that are joined here have other ends
        of_name.update(zip(dim, parts, strict=False))  # a dim of size 1 has no name
    operand = _larger(rule.operands[0], rule)
    if any(name not in of_name for dim in operand for name in dim):
        return None
    return x, tuple("".join(of_name[name] for name in dim) for dim in operand)


def _larger(dims: Dims, rule: Rule) -> Dims:
    """The names of a tensor without those of size 1."""
    return tuple(tuple(name for name in dim if rule.sizes[name] > 1) for dim in dims)


def _stacked(node: fx.Node) -> fx.Node | None:
    """What is picked out of a stack."""
    if op_name(node.target) != "select":
        return None
    stack, dim, index = node.args
    if not isinstance(stack, fx.Node) or op_name(stack.target) != "stack":
        return None
    joined, *at = stack.args
    ndim = len(record(stack).type.shape)
    same = (at[0] if at else 0) % ndim == dim % ndim  # type: ignore[operator]
    return joined[index] if same else None  # type: ignore[index, return-value]
