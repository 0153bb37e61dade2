"""Attention as matrix products, where no fused kernel takes a call: in blocks of queries, so that the scores of the
whole never exist.

The backward is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1): the probabilities are recomputed
from the logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from autopar.runtime.attention.attention_runs import runs_of
from autopar.runtime.kernels import host

Mask = torch.Tensor | None
Factors = Callable[[torch.Tensor, int, slice], torch.Tensor]
"""Of the probabilities of a block, the position of its first query and its keys: what they are multiplied by before
they meet values."""
_BLOCK_BYTES_CPU, _BLOCK_BYTES = 1 << 24, 1 << 28  # of the scores of a block


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, causal: bool, scale: float,
    block_bytes: int | None = None, factors: Factors | None = None, starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, logsumexp). `out` is dense in (b, s, h, e), as `attention` of ir/ops/ops.py says; so are `starts`."""
    (b, h, s, _), e = q.shape, v.shape[3]
    out = q.new_empty((b, s, h, e)).transpose(1, 2)
    lse = torch.empty((b, h, s), dtype=_wide(q.dtype), device=q.device)
    for rows, keys, first in _blocks(q, k, causal, block_bytes, starts):
        scores = _scores(q, k, mask, causal, scale, rows, keys, first)
        part = torch.logsumexp(scores, -1)
        lse[:, :, rows] = part.masked_fill_(part == -torch.inf, 0)
        weights = _probabilities(scores, part, mask)
        if factors is not None:
            weights *= factors(weights, first, keys)
        out[:, :, rows] = torch.matmul(_folded(weights.to(v.dtype), k), v[:, :, keys]).view(*part.shape, e)
    return out, lse


def plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, block_bytes: int | None = None,
    factors: Factors | None = None, starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v. What the blocks give to keys and values is summed in at least float32."""
    wide = _wide(q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, keys, first in _blocks(q, k, causal, block_bytes, starts):
        scores = _scores(q, k, mask, causal, scale, rows, keys, first)
        weights = _probabilities(scores, lse[:, :, rows], mask)
        folded_grad, factor = _folded(grad[:, :, rows], k), None if factors is None else factors(weights, first, keys)
        met = weights if factor is None else weights * factor
        dv[:, :, keys] += torch.matmul(_folded(met.to(v.dtype), k).mT, folded_grad)
        # d(softmax): p * (dp - sum(p dp)), and that sum is grad . out
        delta = (grad[:, :, rows].to(wide) * out[:, :, rows]).sum(-1, keepdim=True)
        dweights = torch.matmul(folded_grad, v[:, :, keys].mT).view(weights.shape)
        dweights = dweights if factor is None else dweights * factor
        dscores = _folded(weights.mul_(dweights - delta).to(q.dtype), k)
        dq[:, :, rows] = torch.matmul(dscores, k[:, :, keys]).view(dq[:, :, rows].shape) * scale
        dk[:, :, keys] += torch.matmul(dscores.mT, _folded(q[:, :, rows], k)) * scale
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(
    q: torch.Tensor, k: torch.Tensor, causal: bool, block_bytes: int | None, starts: Sequence[int]
) -> Iterator[tuple[slice, slice, int]]:
    """(queries, the keys that they may see, the position of the first query in the whole) of each block."""
    (b, h, s, _), t = q.shape, k.shape[2]
    most = block_bytes or (_BLOCK_BYTES_CPU if host.on_host(q) else _BLOCK_BYTES)
    step = max(1, most // max(1, b * h * t * _wide(q.dtype).itemsize))
    for run, position in runs_of(starts or (0,), s):
        for start in range(run.start, run.stop, step):
            stop, first = min(start + step, run.stop), position + start - run.start
            yield slice(start, stop), slice(0, min(first + stop - start, t) if causal else t), first


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, causal: bool, scale: float, rows: slice, keys: slice,
    first: int,
) -> torch.Tensor:  # fmt: skip
    """The masked scores of a block, in at least float32. One product a key head: keys are not repeated."""
    b, h = q.shape[:2]
    count, seen = rows.stop - rows.start, keys.stop
    scores = torch.matmul(_folded(q[:, :, rows] * scale, k), k[:, :, keys].mT).view(b, h, count, seen)
    scores = scores.to(_wide(scores.dtype))
    part = _part(mask, rows, keys)
    if part is not None and part.dtype == torch.bool:
        scores.masked_fill_(~part, -torch.inf)
    elif part is not None:
        scores += part
    if causal:
        hidden = torch.ones(count, seen, dtype=torch.bool, device=q.device).triu_(first + 1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _probabilities(scores: torch.Tensor, lse: torch.Tensor, mask: Mask) -> torch.Tensor:
    """exp(scores - lse), over the scores.

    A mask of numbers comes with all keys of a row, so that each row adds up to 1, or to 0 where it sees none. One that
    torch.finfo(dtype).min hides entirely is uniform: beside such a number its logsumexp has lost log(n).
    """
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    if mask is not None and mask.dtype != torch.bool:
        total = weights.sum(-1, keepdim=True)
        weights /= total.masked_fill_(total == 0, 1)
    return weights


def _part(mask: Mask, rows: slice, keys: slice) -> Mask:
    """A block of the mask, each of whose dims may be 1."""
    if mask is None:
        return None
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.ndim > 0 and mask.shape[-1] > 1 else mask


def _folded(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """x [b,h,s,d] as [b,hk,g*s,d]: the query heads that share a key head, under each other."""
    b, h, s, d = x.shape
    return x.reshape(b, k.shape[1], h // max(k.shape[1], 1) * s, d)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
