"""`autopar::compared_attention` and its backward: attention with a mask that is known by a condition.

Blocks of queries meet the keys that they see: those that all of them see by a kernel without a mask, the others with
the mask of the block. What nobody of a block sees is not computed, and the mask of the whole never exists (the idea of
FlexAttention, arXiv 2412.05496).
"""

from __future__ import annotations

from typing import Any

from autopar.runtime.attention.accumulate import Attended, all_gradients, attend
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.blocks import Block, Tensor, Tensors
from autopar.runtime.attention.compared_blocks import ComparedCall, Decide, Mask, decided
from autopar.runtime.kernels.kernel import Kernel


def compared_attention(
    q: Tensor, k: Tensor, v: Tensor, *call: Any, decide: Decide = decided, part: bool = False, **more: Any
) -> Tensors:
    """(out [b,h,s,e], logsumexp [b,h,s]) as `attention` gives them; a query that sees no key has zeros, and of a part
    of the keys the logsumexp -inf. call, more: see `ComparedCall`."""
    told = ComparedCall(*call, **more)

    def of_block(block: Block, *taken: Tensor) -> Tensors:
        return attention(*taken, block.mask, False, told.scale)

    attended = Attended(q, v, q.dtype, part)
    attend(attended, of_block, Mask.of(q, k, told).blocks(q, decide), q, k, v)
    return attended.result()


def compared_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Any, columns: Any, out: Tensor, lse: Tensor, *call: Any,
    decide: Decide = decided, **more: Any,
) -> Tensors:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    told = ComparedCall(rows, columns, *call, **more)

    def of_block(block: Block, *taken: Tensor) -> Tensors:
        *operands, its_out, its_lse = taken
        return attention_backward(*operands, block.mask, its_out, its_lse, False, told.scale)

    return all_gradients(of_block, Mask.of(q, k, told).blocks(q, decide), (grad, q, out, lse), k, v)


# Opaque to a compiler: which kernels are called hangs on the values of the vectors.
KERNELS = {
    "compared_attention": Kernel(compared_attention),
    "compared_attention_backward": Kernel(compared_attention_backward),
}
