"""Attention by the fused kernels of aten: what each wants to be given, and what its results mean here.

Each takes heads of one width for queries, keys and values, and rows that lie side by side; `attention_kernels.py` pads
and copies. A row that sees no key has out = 0 and lse = 0, whatever the kernel gives. In the backward the zero does
what is wanted by itself: exp(hidden - 0) is 0 for all keys of such a row.
"""

from __future__ import annotations

import torch

from autopar.runtime.attention.blocks import AttentionCall, Mask, Tensor

Grads = tuple[Tensor, Tensor, Tensor]

_aten = torch.ops.aten
_LSE_ROWS, _BIAS_COLUMNS = 32, 16  # of the memory-efficient kernel: rows of a logsumexp, alignment of a bias


# The kernel that `F.scaled_dot_product_attention` uses on a CPU too. It reads grouped keys and values in place, and
# sums their gradients over the group (so on torch 2.11 to 2.13, and tested).


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, call.causal, attn_mask=_additive(call.mask, q), scale=call.scale
    )
    return out, lse


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Grads:
    grads: Grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, call.causal, attn_mask=_additive(call.mask, q), scale=call.scale
    )
    return grads


def _additive(mask: Mask, q: Tensor) -> Mask:
    """The mask as q's dtype, of 2 or 4 dims, at its own size (the kernel broadcasts)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    mask = mask.to(q.dtype)
    while mask.ndim not in (2, 4):
        mask = mask.unsqueeze(0)
    return mask


# FlashAttention-2 on CUDA. It groups heads itself, forward and backward. No mask, and each row sees its first key.


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, call.causal, False, scale=call.scale)
    return out, lse


def cuda_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Grads:
    seed = torch.empty((2,), dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    grads: Grads = _aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, call.causal, seed, offset, scale=call.scale
    )
    return grads


# cuDNN's, from Hopper on. It groups heads itself, takes a bias, and is causal from the top left.


def cudnn(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, _bias(call.mask, q, k), True, 0.0, call.causal, False, scale=call.scale
    )
    return _without_unseeing(out, lse.squeeze(-1), call.mask)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Grads:
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    grads: Grads = _aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, seed, _bias(call.mask, q, k), None, None, q.shape[2],
        k.shape[2], 0.0, call.causal, scale=call.scale,
    )  # fmt: skip
    return grads


# The memory-efficient kernel on CUDA (Rabe and Staats 2021, arXiv:2112.05682): any float of at most 32 bits, with a
# bias, causal from the top left. It does not group heads.


def efficient(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    k, v = _repeated(k, q), _repeated(v, q)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention.default(
        q, k, v, _bias(call.mask, q, k), True, 0.0, call.causal, scale=call.scale
    )
    return _without_unseeing(out, lse[:, :, : q.shape[2]], call.mask)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Grads:
    every_k, every_v = _repeated(k, q), _repeated(v, q)
    # As the forward leaves the rows that are none: exp(scores - inf) is 0.
    lse = torch.constant_pad_nd(lse, [0, -lse.shape[2] % _LSE_ROWS], torch.inf).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes the rows of `out` to lie so
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed of a dropout that there is not
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, every_k, every_v, _bias(call.mask, q, k), out, lse, unused, unused, 0.0, [True, True, True, False],
        call.causal, scale=call.scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


# What these two give for a row that sees nothing is not documented: here a hidden place is a large negative number, and
# such a row is known by its logsumexp.


def _without_unseeing(out: Tensor, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The results of a kernel that was given `_bias`, with zeros in rows that see nothing."""
    if mask is None:
        return out, lse
    unseeing = lse < _hidden(out.dtype) / 2
    return out.masked_fill_(unseeing.unsqueeze(-1), 0), lse.masked_fill(unseeing, 0)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """The key heads once for each query head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradients of repeated heads, summed over the group."""
    heads = x.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _hidden(dtype: torch.dtype) -> float:
    """What is added to hidden scores: half of the least number, so that it stays finite in base 2 and under a sum."""
    return float(torch.finfo(dtype).min) / 2


def _bias(mask: Mask, q: Tensor, k: Tensor) -> Mask:
    """The mask as numbers of q's dtype that are expanded to [b,h,s,t], with aligned rows and without infinities."""
    if mask is None:
        return None
    least, mask = _hidden(q.dtype), _unexpanded(mask)
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, least)
    else:
        bias = mask.to(q.dtype).clamp(min=least)
    columns, more = bias.shape[-1], -bias.shape[-1] % _BIAS_COLUMNS
    bias = torch.constant_pad_nd(bias, [0, more])[..., :columns] if more else bias.contiguous()
    return bias.expand(*q.shape[:3], k.shape[2])


def _unexpanded(mask: Tensor) -> Tensor:
    """A mask of which rows, heads or samples are all the same memory, with one of them."""
    for dim in range(mask.ndim - 1):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    return mask
