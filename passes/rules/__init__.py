"""The table of op rows: how each op may be split.

`rule_of(call)` finds the rule of a call; an op without a row has `replicated_rule`, and the search reports it.
"""

from __future__ import annotations

from types import MappingProxyType

from autopar.ir.plan import Plan
from autopar.passes.rules import (
    attention,
    chains,
    compared_attention,
    contractions,
    convolution,
    creation,
    indexing,
    linalg,
    losses,
    normalisation,
    pieces,
    pointwise,
    random,
    reductions,
    spatial,
    views,
    windows,
)
from autopar.passes.rules.build import replicated_rule
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Call, Row, Rule, Table, allows, call_of

__all__ = ["TABLE", "Call", "Row", "Rule", "Table", "allows", "call_of", "local_call", "replicated_rule", "rule_of",
           "table_of"]  # fmt: skip

_KINDS = (
    pointwise,
    views,
    pieces,
    reductions,
    contractions,
    attention,
    compared_attention,
    normalisation,
    indexing,
    linalg,
    convolution,
    windows,
    spatial,
    losses,
    creation,
    random,
)

_TABLE: Table = {op: row for kind in _KINDS for op, row in kind.ROWS.items()}
TABLE: Table = MappingProxyType({**_TABLE, **chains.rows(_TABLE)})
assert len(_TABLE) == sum(len(kind.ROWS) for kind in _KINDS), "two files have a row of the same op"


def table_of(plan: Plan) -> Table:
    """The rules of a plan: the table's, and those of custom ops."""
    return MappingProxyType({**TABLE, **plan.rules}) if plan.rules else TABLE


def rule_of(call: Call, table: Table = TABLE) -> tuple[Rule, Row] | None:
    """The rule of one call and the row that made it; None for an op that has no row."""
    row = table.get(call.op)
    return None if row is None else (row.rule(call), row)
