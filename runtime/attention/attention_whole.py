"""`autopar::attention` and its backward: softmax(q k^T * scale + mask) v, and the logsumexp of the scores.

Shapes: q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e], h = g * hk; mask broadcasts to [b,h,s,t], True = may be seen, or
is added; causal: query i sees keys 0..i. A row that sees no key has out = 0, lse = 0 and no gradient.
`attention_kernels.py` says which kernel computes it; causal pieces of the queries are blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from autopar.runtime.attention.accumulate import Attended, all_gradients, attend
from autopar.runtime.attention.attention_kernels import OPAQUE, PLAIN, AttentionKernel, kernel_for
from autopar.runtime.attention.blocks import PIECES, AttentionCall, Block, Mask, Tensor, Tensors, run_blocks
from autopar.runtime.kernels.kernel import Kernel


def attention(q: Tensor, k: Tensor, v: Tensor, *call: Any, products: AttentionKernel = PLAIN, **starts: Any) -> Tensors:
    """(out [b,h,s,e], logsumexp [b,h,s] in at least float32). call, starts: see `AttentionCall`. products: the kernel
    of what no fused one takes."""
    told = AttentionCall(*call, **starts)
    if not told.starts:
        return kernel_for(q, k, v, told, products).attention(q, k, v, told)

    def of_block(block: Block, *taken: Tensor) -> Tensors:
        return attention(*taken, block.mask, block.causal, told.scale, products=products)

    attended = Attended(q, v, q.dtype)  # in which no row is in more than two blocks
    attend(attended, of_block, run_blocks(q, k, told), q, k, v)
    return attended.result()


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor, *call: Any,
    products: AttentionKernel = PLAIN, **starts: Any,
) -> Tensors:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    told = AttentionCall(mask, *call, **starts)
    if not told.starts:
        return kernel_for(q, k, v, told, products).attention_backward(grad, q, k, v, out, lse, told)

    def of_block(block: Block, *taken: Tensor) -> Tensors:
        *operands, its_out, its_lse = taken
        return attention_backward(*operands, block.mask, its_out, its_lse, block.causal, told.scale, products=products)

    return all_gradients(of_block, run_blocks(q, k, told, PIECES), (grad, q, out, lse), k, v)


KERNELS = {
    "attention": Kernel(attention, traced=partial(attention, products=OPAQUE)),
    "attention_backward": Kernel(attention_backward, traced=partial(attention_backward, products=OPAQUE)),
}
