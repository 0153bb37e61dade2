"""`autopar::attention` and its backward: softmax(q k^T * scale + mask) v, and the logsumexp of the scores.

Shapes: q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e], h = g * hk; mask broadcasts to [b,h,s,t], True = may be seen, or
is added; causal: query i sees keys 0..i. A row that sees no key has out = 0, lse = 0 and no gradient.
`attention_kernels.py` says which kernel computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.runtime.attention.attention_kernels import PLAIN, call_of, kernel_for
from autopar.runtime.attention.attention_runs import attention_of_runs, attention_of_runs_backward
from autopar.runtime.kernels.kernel import Kernel

Mask = torch.Tensor | None
Tensors = tuple[torch.Tensor, ...]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, scale: float, *,
    starts: Sequence[int] = (),
) -> Tensors:  # fmt: skip
    """(out [b,h,s,e], logsumexp [b,h,s] in at least float32). starts: where the runs of queries begin in the whole."""
    if starts:
        return attention_of_runs(attention, q, k, v, mask, scale, starts)
    return kernel_for(call_of(q, k, v, mask, causal)).attention(q, k, v, mask, causal, scale)


def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, *, starts: Sequence[int] = (),
) -> Tensors:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    if starts:
        return attention_of_runs_backward(attention_backward, grad, q, k, v, mask, out, lse, scale, starts)
    kernel = kernel_for(call_of(q, k, v, mask, causal))
    return kernel.attention_backward(grad, q, k, v, mask, out, lse, causal, scale)


def _traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, scale: float, *,
    starts: Sequence[int] = (),
) -> Any:  # fmt: skip
    """The op of the fused kernel. Plain products are opaque to a compiler, which would make the scores of the whole."""
    if starts:
        return attention_of_runs(_traced, q, k, v, mask, scale, starts)
    kernel = kernel_for(call_of(q, k, v, mask, causal))
    if kernel is PLAIN:
        return op("attention")(*map(_contiguous, (q, k, v, mask)), causal, scale)
    return kernel.attention(q, k, v, mask, causal, scale)


def _traced_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, *, starts: Sequence[int] = (),
) -> Any:  # fmt: skip
    if starts:
        return attention_of_runs_backward(_traced_backward, grad, q, k, v, mask, out, lse, scale, starts)
    kernel = kernel_for(call_of(q, k, v, mask, causal))
    if kernel is PLAIN:
        return op("attention_backward")(*map(_contiguous, (grad, q, k, v, mask, out, lse)), causal, scale)
    return kernel.attention_backward(grad, q, k, v, mask, out, lse, causal, scale)


def _contiguous(x: Mask) -> Mask:
    return x if x is None else x.contiguous()


KERNELS = {
    "attention": Kernel(attention, traced=_traced),
    "attention_backward": Kernel(attention_backward, traced=_traced_backward),
}
