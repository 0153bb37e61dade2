"""`autopar::compared_attention` and its backward: attention with a mask that is known by a condition.

Blocks of queries meet the keys that they see: those that all of them see by a kernel without a mask, the others with
the mask of the block, joined by their logsumexps (Dao et al. 2022, arXiv 2205.14135, section 3.1). What nobody of a
block sees is not computed, and the mask of the whole never exists (the idea of FlexAttention, arXiv 2412.05496).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autopar.runtime.attention.attention_runs import joined
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.compared_blocks import Decide, Mask, MaskBlock, decided, take
from autopar.runtime.kernels.kernel import Kernel

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]


def compared_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], compare: str, causal: bool,
    scale: float, decide: Decide = decided, *, starts: Sequence[int] = (), reach: int | None = None, part: bool = False,
) -> Tensors:  # fmt: skip
    """(out [b,h,s,e], logsumexp [b,h,s]) as `attention` gives them; a query that sees no key has zeros, and of a part
    of the keys the logsumexp -inf."""
    mask = Mask.of(q, k, rows, columns, compare, causal, starts)
    (b, h, s, _), e = q.shape, v.shape[3]
    out = q.new_zeros((b, s, h, e)).transpose(1, 2)
    unseen, dtype = -torch.inf if part else 0.0, torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((b, h, s), unseen, dtype=dtype, device=q.device)
    for block in mask.blocks(q, decide):
        here = block.samples, slice(None), block.rows
        found: Tensors | None = None
        for keys, seen in _calls(mask, block):
            keys_, values = (take(x[block.samples], keys, 2) for x in (k, v))
            one, its = attention(q[here], keys_, values, seen, False, scale)
            its = _behind(its, seen) if part or found is not None else its
            found = (one, its) if found is None else joined(found[0], found[1], one, its)
        if found is not None:
            out[here], lse[here] = found
    return out, lse


def compared_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], out: Tensor,
    lse: Tensor, compare: str, causal: bool, scale: float, decide: Decide = decided, *, starts: Sequence[int] = (),
    reach: int | None = None,
) -> Tensors:  # fmt: skip
    """(dq, dk, dv) in the shapes of q, k, v, summed over the blocks in at least float32."""
    mask = Mask.of(q, k, rows, columns, compare, causal, starts)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for block in mask.blocks(q, decide):
        here = block.samples, slice(None), block.rows
        for keys, seen in _calls(mask, block):
            keys_, values = (take(x[block.samples], keys, 2) for x in (k, v))
            of_q, of_k, of_v = attention_backward(
                grad[here], q[here], keys_, values, seen, out[here], lse[here].contiguous(), False, scale
            )
            dq[here] += of_q
            _add(dk[block.samples], of_k, keys)
            _add(dv[block.samples], of_v, keys)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _calls(mask: Mask, block: MaskBlock) -> Iterator[tuple[tuple[slice, ...], Tensor | None]]:
    """The calls of a kernel for a block of queries: (keys, the mask of them)."""
    if block.seen:
        yield block.seen, None
    if block.partly:
        yield block.partly, mask.part(block.samples, block.rows, block.partly)


def _behind(lse: Tensor, seen: Tensor | None) -> Tensor:
    """As of a part beside another: -inf for a row that sees no key of it, of which a kernel says 0."""
    return lse if seen is None else lse.masked_fill(~seen.any(-1), -torch.inf)


def _add(to: Tensor, values: Tensor, keys: Sequence[slice]) -> None:
    """Add gradients to the keys that they are of."""
    pieces = values.split([one.stop - one.start for one in keys], 2)
    for one, piece in zip(keys, pieces, strict=True):
        to[:, :, one] += piece


# Opaque to a compiler: which kernels are called hangs on the values of the vectors.
KERNELS = {
    "compared_attention": Kernel(compared_attention),
    "compared_attention_backward": Kernel(compared_attention_backward),
}
