"""`autopar::dropped_attention` and its backward: attention with dropout of the probabilities.

The fused kernels draw masks of their own, which hang on their tiles and on the rank. The mask here is that of
`autopar::dropout`, a function of (seed, key, index in the whole [b,h,s,t]), in plain products by blocks of queries.
Nothing is stored for the backward but the output and the logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.attention.attention_plain import plain, plain_backward
from autopar.runtime.attention.blocks import AttentionCall, Mask, Tensor, Tensors
from autopar.runtime.kernels.dropout import dropout_inplace
from autopar.runtime.kernels.kernel import Kernel

Draw = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class DroppedCall:
    """What such an attention is told beside its operands. The probabilities, read in dims of sizes `local`, are the
    piece at `offsets` of dims `whole`; the last two dims are all queries and all keys, but for `starts`, as in
    `attention`."""

    mask: Mask
    seed: Tensor
    causal: bool
    scale: float
    key: int
    p: float
    whole: Sequence[int]
    local: Sequence[int]
    offsets: Sequence[int]
    starts: Sequence[int] = ()

    def drawn(self, draw: Draw) -> AttentionCall:
        """The call, in which the probabilities of a block are multiplied by 0, or 1 / (1 - p)."""

        def factors(weights: Tensor, first: int, keys: slice) -> Tensor:
            sizes = [*self.local[:-2], weights.shape[-2], keys.stop]
            places = [*self.offsets[:-2], first, 0]
            return draw(torch.ones_like(weights), self.seed, self.key, self.p, self.whole, sizes, places)

        return AttentionCall(self.mask, self.causal, self.scale, self.starts, factors)


def dropped_attention(
    q: Tensor, k: Tensor, v: Tensor, *call: Any, draw: Draw = dropout_inplace, **starts: Any
) -> Tensors:
    """(out, logsumexp). call, starts: see `DroppedCall`."""
    return plain(q, k, v, DroppedCall(*call, **starts).drawn(draw))


def dropped_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor, *call: Any,
    draw: Draw = dropout_inplace, **starts: Any,
) -> Tensors:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    return plain_backward(grad, q, k, v, out, lse, DroppedCall(mask, *call, **starts).drawn(draw))


# Opaque to a compiler, as dropout is, and as plain products are.
KERNELS = {
    "dropped_attention": Kernel(dropped_attention),
    "dropped_attention_backward": Kernel(dropped_attention_backward),
}
