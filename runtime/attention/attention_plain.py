"""Attention as matrix products, where no fused kernel takes a call: in blocks of queries, so that the scores of the
whole never exist.

The backward is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1): the probabilities are recomputed
from the logsumexp.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.runtime.attention.blocks import AttentionCall, Mask, RowRuns, Tensor, part_of, wide
from autopar.runtime.kernels import host

_BLOCK_BYTES_CPU, _BLOCK_BYTES = 1 << 24, 1 << 28  # of the scores of a block


def plain(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, block_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp). `out` is dense in (b, s, h, e), as `attention` of ir/ops/ops.py says; so are `starts`."""
    (b, h, s, _), e = q.shape, v.shape[3]
    out = q.new_empty((b, s, h, e)).transpose(1, 2)
    lse = torch.empty((b, h, s), dtype=wide(q), device=q.device)
    for rows, keys, first in _blocks(q, k, call, block_bytes):
        scores = _scores(q, k, call, rows, keys, first)
        part = torch.logsumexp(scores, -1)
        lse[:, :, rows] = part.masked_fill_(part == -torch.inf, 0)
        weights = _probabilities(scores, part, call.mask)
        if call.factors is not None:
            weights *= call.factors(weights, first, keys)
        out[:, :, rows] = torch.matmul(_folded(weights.to(v.dtype), k), v[:, :, keys]).view(*part.shape, e)
    return out, lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v. What the blocks give to keys and values is summed in at least float32."""
    summed = wide(q)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=summed), torch.zeros_like(v, dtype=summed)
    for rows, keys, first in _blocks(q, k, call, block_bytes):
        scores = _scores(q, k, call, rows, keys, first)
        weights = _probabilities(scores, lse[:, :, rows], call.mask)
        folded_grad = _folded(grad[:, :, rows], k)
        factor = None if call.factors is None else call.factors(weights, first, keys)
        met = weights if factor is None else weights * factor
        dv[:, :, keys] += torch.matmul(_folded(met.to(v.dtype), k).mT, folded_grad)
        # d(softmax): p * (dp - sum(p dp)), and that sum is grad . out
        delta = (grad[:, :, rows].to(summed) * out[:, :, rows]).sum(-1, keepdim=True)
        dweights = torch.matmul(folded_grad, v[:, :, keys].mT).view(weights.shape)
        dweights = dweights if factor is None else dweights * factor
        dscores = _folded(weights.mul_(dweights - delta).to(q.dtype), k)
        dq[:, :, rows] = torch.matmul(dscores, k[:, :, keys]).view(dq[:, :, rows].shape) * call.scale
        dk[:, :, keys] += torch.matmul(dscores.mT, _folded(q[:, :, rows], k)) * call.scale
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, call: AttentionCall, block_bytes: int | None) -> Iterator[tuple[slice, slice, int]]:
    """(queries, the keys that they may see, the position of the first query in the whole) of each block."""
    (b, h, s, _), t = q.shape, k.shape[2]
    most = block_bytes or (_BLOCK_BYTES_CPU if host.on_host(q) else _BLOCK_BYTES)
    step = max(1, most // max(1, b * h * t * wide(q).itemsize))
    for run, position in RowRuns.of(call.starts, s).places():
        for start in range(run.start, run.stop, step):
            stop, first = min(start + step, run.stop), position + start - run.start
            yield slice(start, stop), slice(0, min(first + stop - start, t) if call.causal else t), first


def _scores(q: Tensor, k: Tensor, call: AttentionCall, rows: slice, keys: slice, first: int) -> Tensor:
    """The masked scores of a block, in at least float32. One product a key head: keys are not repeated."""
    b, h = q.shape[:2]
    count, seen = rows.stop - rows.start, keys.stop
    scores = torch.matmul(_folded(q[:, :, rows] * call.scale, k), k[:, :, keys].mT).view(b, h, count, seen)
    scores = scores.to(wide(scores))
    part = None if call.mask is None else part_of(call.mask, rows, keys)
    if part is not None and part.dtype == torch.bool:
        scores.masked_fill_(~part, -torch.inf)
    elif part is not None:
        scores += part
    if call.causal:
        hidden = torch.ones(count, seen, dtype=torch.bool, device=q.device).triu_(first + 1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor, mask: Mask) -> Tensor:
    """exp(scores - lse), over the scores.

    A mask of numbers comes with all keys of a row, so that each row adds up to 1, or to 0 where it sees none. One that
    torch.finfo(dtype).min hides entirely is uniform: beside such a number its logsumexp has lost log(n).
    """
    weights = host.exp_(scores.sub_(lse.unsqueeze(-1)))
    if mask is not None and mask.dtype != torch.bool:
        total = weights.sum(-1, keepdim=True)
        weights /= total.masked_fill_(total == 0, 1)
    return weights


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """x [b,h,s,d] as [b,hk,g*s,d]: the query heads that share a key head, under each other."""
    b, h, s, d = x.shape
    return x.reshape(b, k.shape[1], h // max(k.shape[1], 1) * s, d)
