"""`autopar::attention` and its backward: softmax(q k^T * scale + mask) v, and the logsumexp of the scores.

On CPU the flash kernels that `F.scaled_dot_product_attention` uses too (they read grouped keys and values in place,
and sum their gradients over the group: so on torch 2.11 to 2.13, and tested); elsewhere, and where those refuse, plain
matrix products with the backward of FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1): the probabilities
are recomputed from the logsumexp.

Shapes: q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e], h = g * hk; mask broadcasts to [b,h,s,t], True = may be seen, or
is added; causal: query i sees keys 0..i. A row that sees no key has out = 0, lse = 0 and no gradient.
"""

from __future__ import annotations

import torch

from autopar.runtime import host
from autopar.runtime.kernel import Kernel

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Mask = torch.Tensor | None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b,h,s,e], logsumexp [b,h,s] in at least float32)."""
    if not _flash_takes(q, k, v):
        return _plain(q, k, v, mask, causal, scale)
    out, lse = _flash(_rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=_additive(mask, q), scale=scale)
    return out, lse


def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v."""
    if not _flash_takes(q, k, v):
        return _plain_backward(grad, q, k, v, mask, out, lse, causal, scale)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _flash_backward(
        _rows(grad), _rows(q), _rows(k), _rows(v), _rows(out), lse, 0.0, causal,
        attn_mask=_additive(mask, q), scale=scale,
    )  # fmt: skip
    return grads


def _flash_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    # An empty dim is a division by zero (SIGFPE) in the flash kernel of torch 2.13.
    sizes = (*q.shape, k.shape[2])
    return host.on_host(q) and q.is_floating_point() and k.shape[3] == v.shape[3] and 0 not in sizes


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The flash kernel reads rows as contiguous without looking: any other stride gives wrong numbers."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(mask: Mask, q: torch.Tensor) -> Mask:
    """The mask as q's dtype, of 2 or 4 dims, at its own size (the kernel broadcasts)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    mask = mask.to(q.dtype)
    while mask.ndim not in (2, 4):
        mask = mask.unsqueeze(0)
    return mask


def _scores(q: torch.Tensor, k: torch.Tensor, mask: Mask, causal: bool, scale: float) -> torch.Tensor:
    """The masked scores [b,h,s,t], in at least float32. One product a key head: keys are not repeated."""
    b, h, s, _ = q.shape
    t = k.shape[2]
    folded = (q * scale).reshape(_folded(q, k))
    scores = torch.matmul(folded, k.mT).view(b, h, s, t)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        scores += mask
    if causal:
        hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _folded(x: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int, int]:
    """The shape [b,hk,g*s,d] of x [b,h,s,d]: the query heads that share a key head, under each other."""
    b, h, s, d = x.shape
    return b, k.shape[1], h // max(k.shape[1], 1) * s, d


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    b, h, s, _t = scores.shape
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill_(lse == -torch.inf, 0)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
    out = torch.matmul(weights.view(_folded(weights, v)), v)
    return out.view(b, h, s, v.shape[3]), lse


def _plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    b, h, s, d = q.shape
    t = k.shape[2]
    weights = _scores(q, k, mask, causal, scale).sub_(lse.unsqueeze(-1)).exp_()
    folded_grad = grad.reshape(_folded(grad, v))
    dv = torch.matmul(weights.to(v.dtype).view(_folded(weights, k)).mT, folded_grad)
    # d(softmax): p * (dp - sum(p dp)), and that sum is grad . out
    delta = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
    dweights = torch.matmul(folded_grad, v.mT).view(b, h, s, t)
    dscores = weights.mul_(dweights - delta).to(q.dtype).view(_folded(weights, k))
    dq = torch.matmul(dscores, k).view(b, h, s, d) * scale
    dk = torch.matmul(dscores.mT, q.reshape(_folded(q, k))) * scale
    return dq, dk, dv


KERNELS = {
    "attention": Kernel(attention, traced=attention),
    "attention_backward": Kernel(attention_backward, traced=attention_backward),
}
