"""The semantic ops of attention with a mask that is known by a condition (see `comparisons.py`), not by its elements.

Beside queries, keys and values they take vectors over the queries (`rows`, each [b|1, h|1, s|1]) and over the keys
(`columns`, each [b|1, h|1, t|1]): the memory of the mask grows with the length, not with its square.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.ops.semantic import SemanticOp

_MASK = "Tensor[] rows, Tensor[] columns"
_REST = "str compare, bool causal, float scale, *, SymInt[] starts=[], int? reach=None{more}"


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """The output dense in (b, s, h, e), as that of `attention`, and the logsumexp."""
    b, h, s, _d = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((b, s, h, v.shape[-1])).transpose(1, 2), q.new_empty((b, h, s), dtype=dtype)


# A query sees the keys of which `compare` holds, and if `causal` none after its own position. part: these are some keys
# of many, and the logsumexp of a query that sees none of them is -inf. reach: no query sees a key after its own
# position or more than so many before it; of use to who brings the keys.
compared_attention = SemanticOp(
    f"compared_attention(Tensor q, Tensor k, Tensor v, {_MASK}, {_REST.format(more=', bool part=False')}) -> "
    "(Tensor, Tensor)",
    _attention,
    precision="low",
)
compared_attention_backward = SemanticOp(
    f"compared_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, {_MASK}, Tensor out, Tensor lse, "
    f"{_REST.format(more='')}) -> (Tensor, Tensor, Tensor)",
    lambda grad, q, k, v, *_, **__: tuple(map(torch.empty_like, (q, k, v))),
    precision="low",
    statistic=7,
)

# The rows of a mask: x, the mask itself, or where `compare` is not empty one of the vectors over its queries. It is an
# error if a query sees a key after its own position. starts: of the runs of queries, if they are a piece of the whole.
checked_causal = SemanticOp(
    f"checked_causal(Tensor x, {_MASK}, str compare, *, SymInt[] starts=[]) -> Tensor",
    lambda x, *_, **__: torch.empty_like(x, memory_format=torch.contiguous_format),
)
