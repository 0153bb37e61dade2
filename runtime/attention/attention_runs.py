"""Causal attention of a piece of the queries: a few runs of consecutive ones, with all keys that any of them may see.

A run that begins at position p sees the keys before p, all of them, and its own square causally. So it is two calls of
the kernel, of which neither computes a score that is masked away, joined by their logsumexps (Dao et al. 2022, arXiv
2205.14135, section 3.1). With a mask, which may hide a row from one of the two, it is one call with both masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

PIECES = 4  # of the keys before a run, in the backward pass: a kernel makes gradients of as many keys as it is given
Mask = torch.Tensor | None
Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., Tensors]  # (q, k, v, mask, causal, scale) -> (out, lse)
Backward = Callable[..., Tensors]  # (grad, q, k, v, mask, out, lse, causal, scale) -> (dq, dk, dv)


@dataclass(frozen=True, slots=True)
class RunPart:
    """One call of a kernel: rows of the piece, and keys that they see."""

    rows: slice
    keys: slice
    causal: bool
    mask: Mask = None


def runs_of(starts: Sequence[int], count: int) -> Iterator[tuple[slice, int]]:
    """Of a piece of `count` rows each run, with the position of its first row in the whole."""
    width = count // len(starts)
    for place, start in enumerate(starts):
        yield slice(place * width, (place + 1) * width), start


def attention_of_runs(
    forward: Forward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, starts: Sequence[int]
) -> Tensors:
    """(out, logsumexp) as `attention` gives them, for queries whose runs begin at `starts`."""
    outs, sums = [], []
    for rows, start in runs_of(starts, q.shape[2]):
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        for part in _parts(q, k, mask, rows, start):
            found = forward(q[:, :, rows], k[:, :, part.keys], v[:, :, part.keys], part.mask, part.causal, scale)
            out, lse = found if out is None or lse is None else joined(out, lse, *found)
        assert out is not None and lse is not None
        outs.append(out)
        sums.append(lse)
    if len(outs) == 1:
        return outs[0], sums[0]
    return torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2), torch.cat(sums, 2)


def attention_of_runs_backward(
    backward: Backward, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
    out: torch.Tensor, lse: torch.Tensor, scale: float, starts: Sequence[int],
) -> Tensors:  # fmt: skip
    """(dq, dk, dv), summed over the calls in at least float32: each needs but the logsumexp of whole rows."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, start in runs_of(starts, q.shape[2]):
        for part in _parts(q, k, mask, rows, start, PIECES):
            keys = part.keys
            of_q, of_k, of_v = backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], part.mask, out[:, :, rows],
                lse[:, :, rows].contiguous(), part.causal, scale,
            )  # fmt: skip
            dq[:, :, rows] += of_q
            dk[:, :, keys] += of_k
            dv[:, :, keys] += of_v
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _parts(q: torch.Tensor, k: torch.Tensor, mask: Mask, rows: slice, start: int, pieces: int = 1) -> Iterator[RunPart]:
    """The calls for a run that begins at position `start`; pieces: of the keys before it, if they are many."""
    stop, t = start + rows.stop - rows.start, k.shape[2]
    if mask is not None or stop > t:
        keys = slice(0, min(stop, t))
        yield RunPart(rows, keys, False, _with_causal(mask, rows, keys, start, q.device))
        return
    step = max(stop - start, -(-start // pieces))
    for first in range(0, start, step):
        yield RunPart(rows, slice(first, min(first + step, start)), False)
    yield RunPart(rows, slice(start, stop), True)


def _with_causal(mask: Mask, rows: slice, keys: slice, start: int, device: torch.device) -> torch.Tensor:
    """The mask of a run, [.., rows, keys], and what is causal in it."""
    seen = torch.ones(rows.stop - rows.start, keys.stop, dtype=torch.bool, device=device).tril_(start)
    if mask is None:
        return seen
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if mask.ndim > 0 and mask.shape[-1] > 1:
        mask = mask[..., keys]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def joined(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> Tensors:
    """Attention to two sets of keys, of which each row sees some of both."""
    both = torch.logaddexp(lse, other_lse)
    weights = ((one - both).exp_().unsqueeze(-1) for one in (lse, other_lse))
    found = sum(part * weight for part, weight in zip((out, other), weights, strict=True))
    assert isinstance(found, torch.Tensor)
    return found.to(out.dtype), both
