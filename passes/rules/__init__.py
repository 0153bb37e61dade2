"""How may each op be split? The table of op rows.

`rule_of(call)` finds the rule of a call; an op without a row has `replicated_rule`, and the search reports it.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import MappingProxyType
from typing import Any

from torch import fx

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

__all__ = ["TABLE", "Call", "Row", "Rule", "Rules", "Table", "allows", "call_of", "form_of", "local_call",
           "replicated_rule", "rule_of", "table_of"]  # fmt: skip

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


class Rules:
    """The rules of a program's calls: one for all those with operands of the same types and the same other arguments,
    as the layers of a model have them."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: dict[Hashable, tuple[Rule, Row] | None] = {}

    def of(self, call: Call) -> tuple[Rule, Row] | None:
        """See `rule_of`."""
        if call.op not in TABLE:  # a custom op's, whose rule is the user's code
            return rule_of(call, self._table)
        form = form_of(call)
        if form not in self._known:
            self._known[form] = rule_of(call, self._table)
        return self._known[form]


def form_of(call: Call) -> Hashable:
    """What a rule sees of a call: all but which tensors they are."""
    return call.op, _form(call.args), _form(call.kwargs), call.operands, call.results


def _form(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        return fx.Node
    if isinstance(value, (tuple, list)):
        return tuple([_form(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _form(item)) for key, item in value.items()])
    return value if type(value) in (int, str) else (type(value), repr(value))  # 1, 1.0 and True are equal
