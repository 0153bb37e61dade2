"""Attention, raised to one op; spelled out where it gives its weights, or its mask is trained."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.capture.ops.functions import Attention, DroppedAttention, Einsum
from autopar.capture.ops.raised_products import autocast, linear
from autopar.capture.ops.raised_random import RandomMode

Tensor = torch.Tensor


def attention(
    mode: RandomMode, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float =
    0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    q, k, v = query, key, value
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]):
        return NotImplemented
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or (q.shape[1] != k.shape[1] and not enable_gqa):
        return NotImplemented
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = autocast(q, k, v)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if mode.captures and not (attn_mask is not None and attn_mask.requires_grad):
        return _fused(mode, q, k, v, attn_mask, dropout_p, is_causal, float(scale))
    if dropout_p == 0.0 and not mode.captures:
        return NotImplemented
    return _plain_attention(mode, q, k, v, attn_mask, dropout_p, is_causal, float(scale))[0]


def _fused(
    mode: RandomMode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    if dropout_p == 0.0:
        return Attention.apply(q, k, v, mask, causal, scale)
    seed, key = mode.drawing()
    return DroppedAttention.apply(q, k, v, mask, seed, causal, scale, key, float(dropout_p))


def _plain_attention(
    mode: RandomMode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, for what no semantic op does, a mask that is trained and the weights; and what the plain
    module computes for comparison, with the same draws."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    scores = Einsum.apply(q, k, "abcd,abed->abce") * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = mode.dropout(torch.softmax(scores, -1), dropout_p)
    return Einsum.apply(weights, v, "abce,abed->abcd"), weights


def multi_head_attention(
    mode: RandomMode, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None,
    k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> Any:  # fmt: skip
    """`F.multi_head_attention_forward`, [seq, batch, embed] in and out; the projections are packed or apart."""
    unusual = bias_k is not None or add_zero_attn or static_k is not None
    dropout_p = dropout_p if training else 0.0
    if unusual or query.ndim != 3 or not (mode.captures or dropout_p):
        return NotImplemented
    embed, batch = query.shape[-1], query.shape[1]
    packed = None if use_separate_proj_weight else in_proj_weight
    if packed is not None and query is key and key is value:
        parts = list(linear(query, packed, in_proj_bias).chunk(3, -1))
    else:
        matrices = (q_proj_weight, k_proj_weight, v_proj_weight) if packed is None else packed.chunk(3)
        biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        parts = [linear(x, w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True)]
    q, k, v = (x.unflatten(-1, (num_heads, embed // num_heads)).permute(1, 2, 0, 3) for x in parts)
    mask = _merge_masks(attn_mask, key_padding_mask, batch, num_heads, q.dtype)
    rest = (is_causal and mask is None, 1.0 / math.sqrt(embed // num_heads))
    weights: Tensor | None = None
    if not mode.captures or need_weights or (mask is not None and mask.requires_grad):
        out, weights = _plain_attention(mode, q, k, v, mask, dropout_p, *rest)
    else:
        out = _fused(mode, q, k, v, mask, dropout_p, *rest)
    result = linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights or weights is None:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one additive mask [batch or 1, heads or 1, s or 1, t]; a True in a bool mask is left out."""
    masks = []
    if attn_mask is not None:
        shaped = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
        masks.append(shaped)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    merged: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
        merged = mask if merged is None else merged + mask
    return merged
