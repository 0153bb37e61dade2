"""`autopar::attention` and its backward: softmax(q k^T * scale + mask) v, and the logsumexp of the scores.

Shapes: q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e], h = g * hk; mask broadcasts to [b,h,s,t], True = may be seen, or
is added; causal: query i sees keys 0..i. A row that sees no key has out = 0, lse = 0 and no gradient.
`attention_kernels.py` says which kernel computes it; causal pieces of the queries are blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.ops.ops import op
from autopar.runtime.attention.accumulate import Attended, all_gradients, attend
from autopar.runtime.attention.attention_kernels import PLAIN, kernel_for, shape_of
from autopar.runtime.attention.blocks import PIECES, AttentionCall, Block, Mask, Tensor, Tensors, run_blocks
from autopar.runtime.kernels.kernel import Kernel

Compute = Callable[..., Tensors]  # the operands, and the call


def attention(q: Tensor, k: Tensor, v: Tensor, *call: Any, **starts: Any) -> Tensors:
    """(out [b,h,s,e], logsumexp [b,h,s] in at least float32). call, starts: see `AttentionCall`."""
    return in_blocks(_whole, q, k, v, AttentionCall(*call, **starts))


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor, *call: Any, **starts: Any
) -> Tensors:
    """(dq, dk, dv) in the shapes of q, k, v."""
    return _in_blocks_backward(_whole_backward, (grad, q, out, lse), k, v, AttentionCall(mask, *call, **starts))


def _traced(q: Tensor, k: Tensor, v: Tensor, *call: Any, **starts: Any) -> Tensors:
    return in_blocks(_opaque, q, k, v, AttentionCall(*call, **starts))


def _traced_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor, *call: Any, **starts: Any
) -> Tensors:
    return _in_blocks_backward(_opaque_backward, (grad, q, out, lse), k, v, AttentionCall(mask, *call, **starts))


def in_blocks(compute: Compute, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensors:
    """Attention in the blocks of the runs of queries, of which no row is in more than two; in one if there are none."""
    if not call.starts:
        return compute(q, k, v, call)
    attended = Attended(q, v, q.dtype)
    attend(attended, lambda block, *taken: compute(*taken, call.of(block)), run_blocks(q, k, call), q, k, v)
    return attended.result()


def _in_blocks_backward(compute: Compute, queries: Tensors, k: Tensor, v: Tensor, call: AttentionCall) -> Tensors:
    grad, q, out, lse = queries
    if not call.starts:
        return compute(grad, q, k, v, out, lse, call)

    def of_block(block: Block, *taken: Tensor) -> Tensors:
        return compute(*taken, call.of(block))

    return all_gradients(of_block, run_blocks(q, k, call, PIECES), queries, k, v)


def _whole(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensors:
    return kernel_for(shape_of(q, k, v, call)).attention(q, k, v, call)


def _whole_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Tensors:
    return kernel_for(shape_of(q, k, v, call)).attention_backward(grad, q, k, v, out, lse, call)


def _opaque(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Any:
    """The op of the fused kernel. Plain products are opaque to a compiler, which would make the scores of the whole."""
    kernel = kernel_for(shape_of(q, k, v, call))
    if kernel is PLAIN:
        return op("attention")(*map(_contiguous, (q, k, v, call.mask)), call.causal, call.scale)
    return kernel.attention(q, k, v, call)


def _opaque_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Any:
    kernel = kernel_for(shape_of(q, k, v, call))
    if kernel is PLAIN:
        dense = map(_contiguous, (grad, q, k, v, call.mask, out, lse))
        return op("attention_backward")(*dense, call.causal, call.scale)
    return kernel.attention_backward(grad, q, k, v, out, lse, call)


def _contiguous(x: Mask) -> Mask:
    return x if x is None else x.contiguous()


KERNELS = {
    "attention": Kernel(attention, traced=_traced),
    "attention_backward": Kernel(attention_backward, traced=_traced_backward),
}
