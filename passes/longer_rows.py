"""How a call is computed on rows that were added to a sequence: along which name of its rule, and where zeros stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops import semantic_of
from autopar.ir.program import TensorType, operand_nodes, record
from autopar.passes.rules import call_of, linalg, local_call, rule_of
from autopar.passes.rules.rule import Dims, Rule, Table

aten = torch.ops.aten
_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")


@dataclass(frozen=True, slots=True)
class Rows:
    """A value with more rows. dim: of the rows; is_zero: the rows added are zeros, else rows of the value again."""

    dim: int
    is_zero: bool


@dataclass(frozen=True, slots=True)
class Longer:
    """A call on longer operands.

    operands: of each the dim of its rows, None if it has none; results: likewise, with what the rows added hold.
    """

    operands: tuple[int | None, ...]
    results: tuple[Rows | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def by_rule(node: fx.Node, rows: Mapping[fx.Node, Rows], short: int, long: int, table: Table) -> Longer | None:
    """A call that takes the rows one by one, or sums over rows of which those added are certain to be zero. None for
    others."""
    call = call_of(node)
    pair, semantic = rule_of(call, table), semantic_of(node.target)
    if pair is None or (semantic is not None and semantic.random) or call.op in linalg.ROWS:
        return None
    rule, row = pair
    operands = operand_nodes(node)
    names = {dims[rows[one].dim] for one, dims in zip(operands, rule.operands, strict=True) if one in rows}
    if len(names) != 1 or len(first := names.pop()) != 1:
        return None
    name = first[0]
    if rule.sizes[name] != short or name in rule.replicated | rule.ordered:
        return None
    if any(name in dim and dim != (name,) for dims in (*rule.operands, *rule.results) for dim in dims):
        return None
    places = [_place(dims, name) for dims in rule.operands]
    zero = [_is_zero(one, place, rows) for one, place in zip(operands, places, strict=True)]
    stays_zero = _stays_zero(rule, call.op, zero)
    results = [_place(dims, name) for dims in rule.results]
    if None in results and not (stays_zero and rule.partial == "sum"):
        return None
    shapes = [_longer(type_.shape, place, long) for type_, place in zip(call.results, results, strict=True)]
    args, kwargs = local_call(call, row, rule, shapes, {**rule.sizes, name: long})
    made = tuple(None if place is None else Rows(place, stays_zero) for place in results)
    found = Longer(tuple(places), made, args, kwargs)
    return found if _gives(node, found, rule, shapes, long) else None


def _stays_zero(rule: Rule, name: str, zero: list[bool]) -> bool:
    """Whether rows of zeros in some operands make zeros of the results."""
    groups = (frozenset({0}),) if name in _SUMS else rule.linear
    return any(group and all(zero[i] for i in group) for group in groups)


def _place(dims: Dims, name: str) -> int | None:
    return next((dim for dim, names in enumerate(dims) if name in names), None)


def _is_zero(operand: fx.Node, place: int | None, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether the rows added to an operand are zeros: what the backward pass made is filled up with them."""
    if place is None:
        return False
    return rows[operand].is_zero if operand in rows else record(operand).is_backward


def _longer(shape: tuple[int, ...], place: int | None, long: int) -> tuple[int, ...]:
    return shape if place is None else (*shape[:place], long, *shape[place + 1 :])


def _gives(node: fx.Node, found: Longer, rule: Rule, shapes: list[tuple[int, ...]], long: int) -> bool:
    """Whether torch gives these shapes: an argument may hold the number of rows."""
    places = dict(zip(operand_nodes(node), found.operands, strict=True))

    def empty(one: fx.Node) -> torch.Tensor:
        type_: TensorType = record(one).type
        return torch.empty(_longer(type_.shape, places.get(one), long), dtype=type_.dtype, device="meta")

    args, kwargs = fx.node.map_arg((found.args, found.kwargs), empty)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    tensors = [one for one in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(one, torch.Tensor)]
    return [tuple(one.shape) for one in tensors] == shapes
