"""Attention: softmax(q k^T * scale + mask) v, with g query heads to each of the k key heads.

Softmax needs all keys (t), and its logits all of d. Queries (s) are independent; where the causal mask or dropout
counts them, a kernel is told where in the whole its piece lies.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import argument
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Arguments, Call, Pieces, Row, Rule

Q, K, V, OUT, LSE = "b (k g) s d", "b k t d", "b k t e", "b (k g) s e", "b (k g) s"


def _mask(call: Call, at: int) -> list[str]:
    """The dims of the mask, if there is one: broadcast to b (k g) s t."""
    if argument(call, at, "mask") is None:
        return []
    shape = call.operands[at].shape
    names = ("b", "(k g)", "s", "t")[4 - len(shape) :]
    return [" ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))]


_WHOLE = frozenset({"t", "d", "e"})
_QUERIES = frozenset({"s"})


def _rows(call: Call, at: int) -> frozenset[str]:
    """The queries, if each sees the keys up to its own position."""
    return _QUERIES if argument(call, at, "causal") else frozenset()


def _points(call: Call, q: int, k: int) -> int:
    """Pairs of a query and a key, over heads and batch."""
    b, h, s, _ = call.operands[q].shape
    return b * h * s * call.operands[k].shape[2]


def _attention(call: Call) -> Rule:
    spec = f"{', '.join((Q, K, V, *_mask(call, 3)))} -> {OUT}, {LSE}"
    d, e = call.operands[0].shape[3], call.operands[2].shape[3]
    flops = 2 * _points(call, 0, 1) * (d + e)
    rows = _rows(call, 4)
    return instantiate(spec, call, replicated=_WHOLE, positional=rows, growing=rows, flops=flops)


def _attention_backward(call: Call) -> Rule:
    spec = f"{', '.join((OUT, Q, K, V, *_mask(call, 4), OUT, LSE))} -> {Q}, {K}, {V}"
    d, e = call.operands[1].shape[3], call.operands[3].shape[3]
    flops = 2 * _points(call, 1, 2) * (3 * d + 2 * e)  # the logits once more, and a product for each gradient
    rows = _rows(call, 7)
    return instantiate(spec, call, replicated=_WHOLE, positional=rows, growing=rows, linear=({0},), flops=flops)


def _dropped(call: Call) -> Rule:
    spec = f"{', '.join((Q, K, V, *_mask(call, 3), 'z'))} -> {OUT}, {LSE}"
    flops = 2 * _points(call, 0, 1) * (call.operands[0].shape[3] + call.operands[2].shape[3])
    whole, rows = _WHOLE | {"z"}, _rows(call, 5)
    return instantiate(spec, call, replicated=whole, positional=_QUERIES, growing=rows, flops=flops)


def _dropped_backward(call: Call) -> Rule:
    spec = f"{', '.join((OUT, Q, K, V, *_mask(call, 4), OUT, LSE, 'z'))} -> {Q}, {K}, {V}"
    flops = 2 * _points(call, 1, 2) * (3 * call.operands[1].shape[3] + 2 * call.operands[3].shape[3])
    whole, rows = _WHOLE | {"z"}, _rows(call, 8)
    return instantiate(
        spec, call, replicated=whole, positional=_QUERIES, growing=rows, linear=({0},), flops=flops
    )  # fmt: skip


def _drawn(pieces: Pieces) -> Arguments:
    """Where the piece of the probabilities lies: every dim as its names are cut, but for the queries, as a whole."""
    sizes = pieces.rule.sizes
    cuts = [cut for name in ("b", "k", "g") for cut in pieces.reading(name)]
    cuts += [(sizes[name], sizes[name], 0) for name in ("s", "t")]
    return (*pieces.call.args[:-3], *([cut[i] for cut in cuts] for i in range(3))), {}


ROWS: Mapping[str, Row] = {
    "autopar.dropped_attention.default": Row(_dropped, local=_drawn, free_args=(7,)),
    "autopar.dropped_attention_backward.default": Row(_dropped_backward, local=_drawn, free_args=(10,)),
    "autopar.attention.default": Row(_attention),
    "autopar.attention_backward.default": Row(_attention_backward),
}
