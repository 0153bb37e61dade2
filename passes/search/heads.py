"""The heads of attention, and into how many parts an axis may split them."""

from __future__ import annotations

from autopar.errors import divisors
from autopar.ir.program import Program
from autopar.passes.rules import call_of, rule_of
from autopar.passes.search.search import ATTENTION, HEADS


def head_splits(keys: int, group: int, inner: int) -> list[int]:
    """The sizes of an axis that splits heads of keys, or the queries that share one. group: of these. inner: ranks of
    tp, which splits the parts."""
    return [n for n in divisors(max(1, keys * group // inner)) if keys % (inner * n) == 0 or group % n == 0]


def heads_of(program: Program) -> frozenset[tuple[int, int]]:
    """(heads of keys, queries that share one) of all attentions."""
    rules = (rule_of(call_of(node)) for node in program.calls() if node.target in ATTENTION)
    keys, group = HEADS
    return frozenset((rule[0].sizes[keys], rule[0].sizes[group]) for rule in rules if rule is not None)
