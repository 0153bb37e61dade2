"""How a call is computed on rows that were added to a sequence: along which name of its rule, and where zeros stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ir.program import operand_nodes, record
from autopar.passes.rules import call_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import Through, gives, resize, through


@dataclass(frozen=True, slots=True)
class LongerRows:
    """A value with more rows. dim: of the rows; is_zero: the rows added are zeros, else rows of the value again."""

    dim: int
    is_zero: bool


@dataclass(frozen=True, slots=True)
class Longer:
    """A call on longer operands.

    operands: of each the dim of its rows, None if it has none; results: likewise, with what the rows added hold.
    """

    operands: tuple[int | None, ...]
    results: tuple[LongerRows | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def by_rule(node: fx.Node, rows: Mapping[fx.Node, LongerRows], short: int, long: int, table: Table) -> Longer | None:
    """A call that takes the rows one by one, or sums over rows of which those added are certain to be zero. None for
    others."""
    operands = operand_nodes(node)
    known = {i: (rows[one].dim, 1) for i, one in enumerate(operands) if one in rows}
    found = through(call_of(node), known, table, short)
    if isinstance(found, str) or not _are_dims(found, short) or not gives(node, found, short, long):
        return None
    dims = [at and at[0] for at in found.operands]
    stays_zero = _stays_zero(found, [_is_zero(one, dim, rows) for one, dim in zip(operands, dims, strict=True)])
    if found.adds_up and not (stays_zero and found.rule.partial == "sum"):
        return None
    results = tuple(at and LongerRows(at[0], stays_zero) for at in found.results)
    return Longer(tuple(dims), results, *resize(found, short, long).arguments)


def _are_dims(found: Through, short: int) -> bool:
    """Whether the rows are a dim of each tensor that has them, and never a part of one."""
    types = (*found.call.operands, *found.call.results)
    places: tuple[Split | None, ...] = (*found.operands, *found.results)
    return all(at is None or type_.shape[at[0]] == short for type_, at in zip(types, places, strict=True))


def _stays_zero(found: Through, zero: list[bool]) -> bool:
    """Whether rows of zeros in some operands make zeros of the results."""
    return any(group and all(zero[i] for i in group) for group in found.linear)


def _is_zero(operand: fx.Node, dim: int | None, rows: Mapping[fx.Node, LongerRows]) -> bool:
    """Whether the rows added to an operand are zeros: what the backward pass made is filled up with them."""
    if dim is None:
        return False
    return rows[operand].is_zero if operand in rows else record(operand).is_backward
