"""Attention with a mask that is a condition on vectors over the queries and over the keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autopar.passes.rules.attention import LSE, OUT, K, Q, V
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Row, Rule

_WHOLE = frozenset({"t", "d", "e"})


def _compared(call: Call) -> Rule:
    *_, rows, columns, _compare, causal, _scale = call.args
    return _rule(call, (Q, K, V), rows, columns, (), (OUT, LSE), causal, lambda d, e: d + e)


def _compared_backward(call: Call) -> Rule:
    *_, rows, columns, _out, _lse, _compare, causal, _scale = call.args
    return _rule(call, (OUT, Q, K, V), rows, columns, (OUT, LSE), (Q, K, V), causal, lambda d, e: 3 * d + 2 * e)


def _rule(
    call: Call, first: tuple[str, ...], rows: Any, columns: Any, last: tuple[str, ...], results: tuple[str, ...],
    causal: bool, widths: Any,
) -> Rule:  # fmt: skip
    """first, last: the operands before and after the vectors."""
    at = len(first)
    vectors = [*_vectors(call, range(at, at + len(rows)), "s")]
    at += len(rows)
    vectors += _vectors(call, range(at, at + len(columns)), "t")
    q, k, v = (call.operands[len(first) - 3 + i].shape for i in range(3))
    counted = frozenset({"s"}) if causal else frozenset()
    return instantiate(
        f"{', '.join((*first, *vectors, *last))} -> {', '.join(results)}", call, replicated=_WHOLE, positional=counted,
        growing=counted, linear=({0},) if len(first) == 4 else (),
        flops=2 * q[0] * q[1] * q[2] * k[2] * widths(q[3], v[3]),
    )  # fmt: skip


def _checked(call: Call) -> Rule:
    """Each query beside all keys; along dims of which what is given back has one, all are checked together."""
    _x, rows, columns, _compare = call.args
    lasts = ["s" if rows else "st", *["s"] * len(rows), *["t"] * len(columns)]
    named = [
        " ".join("1" if size == 1 else name for name, size in zip(f"bh{last}", operand.shape, strict=True))
        for last, operand in zip(lasts, call.operands, strict=True)
    ]
    free = {"b", "h", "s"} & set(named[0])
    return instantiate(
        f"{', '.join(named)} -> {named[0]}", call, replicated={"b", "h", "s", "t"} - free, positional={"s"} & free
    )


def _vectors(call: Call, places: Iterable[int], last: str) -> Iterable[str]:
    """The dims of vectors: broadcast to b (k g) and the queries or the keys."""
    for at in places:
        shape = call.operands[at].shape
        yield " ".join("1" if size == 1 else name for name, size in zip(("b", "(k g)", last), shape, strict=True))


ROWS: Mapping[str, Row] = {
    "autopar.compared_attention.default": Row(_compared),
    "autopar.compared_attention_backward.default": Row(_compared_backward),
    "autopar.checked_causal.default": Row(_checked),
}
