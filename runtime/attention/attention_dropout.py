"""`autopar::dropped_attention` and its backward: attention with dropout of the probabilities.

The fused kernels draw masks of their own, which hang on their tiles and on the rank. The mask here is that of
`autopar::dropout`, a function of (seed, key, index in the whole [b,h,s,t]), in plain products by blocks of queries.
Nothing is stored for the backward but the output and the logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.runtime.attention.attention_plain import Factors, Mask, plain, plain_backward
from autopar.runtime.kernels.dropout import dropout_inplace
from autopar.runtime.kernels.kernel import Kernel

Draw = Callable[..., torch.Tensor]


def dropped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, seed: torch.Tensor, causal: bool, scale: float,
    key: int, p: float, whole: Sequence[int], local: Sequence[int], offsets: Sequence[int],
    draw: Draw = dropout_inplace, *, starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, logsumexp). The probabilities, read in dims of sizes `local`, are the piece at `offsets` of dims `whole`;
    the last two dims are all queries and all keys, but for `starts`, as in `attention`."""
    factors = _factors(draw, seed, key, p, whole, local, offsets)
    return plain(q, k, v, mask, causal, scale, factors=factors, starts=starts)


def dropped_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, out: torch.Tensor,
    lse: torch.Tensor, seed: torch.Tensor, causal: bool, scale: float, key: int, p: float, whole: Sequence[int],
    local: Sequence[int], offsets: Sequence[int], draw: Draw = dropout_inplace, *, starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    factors = _factors(draw, seed, key, p, whole, local, offsets)
    return plain_backward(grad, q, k, v, mask, out, lse, causal, scale, factors=factors, starts=starts)


def _factors(
    draw: Draw, seed: torch.Tensor, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[int],
) -> Factors:  # fmt: skip
    """What the probabilities of a block are multiplied by: 0, or 1 / (1 - p)."""

    def factors(weights: torch.Tensor, first: int, keys: slice) -> torch.Tensor:
        sizes = [*local[:-2], weights.shape[-2], keys.stop]
        places = [*offsets[:-2], first, 0]
        return draw(torch.ones_like(weights), seed, key, p, whole, sizes, places)

    return factors


# Opaque to a compiler, as dropout is, and as plain products are.
KERNELS = {
    "dropped_attention": Kernel(dropped_attention),
    "dropped_attention_backward": Kernel(dropped_attention_backward),
}
