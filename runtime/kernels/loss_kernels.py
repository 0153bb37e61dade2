"""`autopar::logsumexp`, `pick` and `cross_entropy_backward`: the three halves of a cross entropy over the last dim.

loss = logsumexp(x) - pick(x, index); its gradient is exp(x - lse) - onehot(index). The rows go through in pieces, on a
CPU such that stay in cache. No second [tokens, vocab] buffer exists but the backward's result, also for logits in a
short float, which are widened piece by piece (the idea of Liger-Kernel's fused cross entropy, arXiv:2410.10989, without
its loss).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.ir.ops.measure import PIECE_BYTES, PIECE_BYTES_CPU
from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """x [..., v] -> [...] in the next wider dtype (float64 of float32); -inf where all of a row is."""
    wide, kept = _wide(x.dtype), _kept(x.dtype)
    if x.numel() == 0:
        return torch.full(x.shape[:-1], -torch.inf, dtype=kept, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape[0], dtype=kept, device=x.device)
    for start, stop, buffer in _pieces(rows, wide):
        piece = rows[start:stop]
        top = piece.amax(-1, keepdim=True).to(wide)
        top = top.masked_fill_(top.abs() == torch.inf, 0)
        total = host.exp_(torch.sub(piece, top, out=buffer)).sum(-1)
        out[start:stop] = total.to(kept).log_().add_(top.squeeze(-1))
    return out.view(x.shape[:-1])


def pick(x: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """x [..., v], index [...] -> x[..., index - offset], 0 where that is outside of 0..v-1."""
    if x.shape[-1] == 0:
        return x.new_zeros(index.shape)
    column, outside = _columns(index, x.shape[-1], offset)
    return x.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill_(outside, 0)


def pick_backward(grad: torch.Tensor, index: torch.Tensor, size: int, *, offset: int = 0) -> torch.Tensor:
    """grad [...] at column index - offset of zeros [..., size]; nowhere if that is outside."""
    out = grad.new_zeros((*index.shape, size))
    if size == 0:
        return out
    column, outside = _columns(index, size, offset)
    return out.scatter_(-1, column.unsqueeze(-1), grad.masked_fill(outside, 0).unsqueeze(-1))


def cross_entropy_backward(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None,
    *, offset: int = 0,
) -> torch.Tensor:  # fmt: skip
    """grad [...] * exp(x - lse) - picked [...] * onehot(index - offset) [..., v], in x's dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _cross_entropy_backward(grad, x, lse, index, picked, out, offset)


def cross_entropy_backward_inplace(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None,
    *, offset: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute the gradient over x if x is contiguous: each element is read once, then written."""
    out = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    return _cross_entropy_backward(grad, x, lse, index, picked, out, offset)


def _cross_entropy_backward(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None,
    out: torch.Tensor, offset: int,
) -> torch.Tensor:  # fmt: skip
    if x.numel() == 0:
        return out
    wide = _wide(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    result = out.view(rows.shape)
    scale = grad.reshape(-1, 1).to(wide)
    column, outside = _columns(index.reshape(-1, 1), x.shape[-1], offset)
    taken = scale if picked is None else picked.reshape(-1, 1).to(wide)
    shift, rest = _two_parts(lse.reshape(-1, 1), wide)
    scale = scale if rest is None else scale * rest.neg_().exp_()  # exp(x - lse) = exp(x - shift) exp(-rest)
    one_hot = taken.masked_fill(outside, 0).expand_as(column)
    for start, stop, buffer in _pieces(rows, wide, result):
        piece = host.exp_(torch.sub(rows[start:stop], shift[start:stop], out=buffer)).mul_(scale[start:stop])
        place = column[start:stop]
        # Not scatter_add_, which has no order of its own on a GPU: torch refuses it where algorithms must have one.
        piece.scatter_(-1, place, piece.gather(-1, place).sub_(one_hot[start:stop]))
        if wide != x.dtype:
            result[start:stop] = piece
    return out


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _kept(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a logsumexp of `dtype`: the next wider one."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def _two_parts(lse: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """lse rounded to `wide`, with 0 for -inf, and what the rounding left, None if nothing: together they are lse."""
    lse = torch.where(lse == -torch.inf, 0, lse)
    near = lse.to(wide)
    return near, None if near.dtype == lse.dtype else (lse - near).nan_to_num_().to(wide)


def _columns(index: torch.Tensor, size: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index into this piece of the last dim, made valid everywhere, and where it was not valid."""
    local = index - offset if offset else index
    column = local.clamp(0, size - 1)
    return column, column != local


def _pieces(
    rows: torch.Tensor, wide: torch.dtype, result: torch.Tensor | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Ranges of rows, and where to compute each: in its rows of `result` if these are wide, or in the same memory."""
    count, width = rows.shape
    step = max(1, (PIECE_BYTES_CPU if host.on_host(rows) else PIECE_BYTES) // (width * 4))
    in_place = result is not None and result.dtype == wide
    buffer = result if in_place else torch.empty((min(step, count), width), dtype=wide, device=rows.device)
    assert buffer is not None
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield start, stop, buffer[start:stop] if in_place else buffer[: stop - start]


def _traced_logsumexp(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] == 0:  # a rank without classes
        return torch.full(x.shape[:-1], -torch.inf, dtype=_kept(x.dtype), device=x.device)
    top = x.amax(-1, keepdim=True).to(_wide(x.dtype))
    top = torch.where(top.abs() == torch.inf, 0, top)
    return (x - top).exp().sum(-1).to(_kept(x.dtype)).log() + top.squeeze(-1)


def _traced_pick_backward(grad: torch.Tensor, index: torch.Tensor, size: int, *, offset: int = 0) -> torch.Tensor:
    return torch.where(_one_hot(index, size, offset), grad.unsqueeze(-1), 0)


def _traced_cross_entropy_backward(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None,
    *, offset: int = 0,
) -> torch.Tensor:  # fmt: skip
    wide = _wide(x.dtype)
    taken = grad if picked is None else picked
    shift, rest = _two_parts(lse.unsqueeze(-1), wide)
    scale = grad.to(_wide(grad.dtype)).unsqueeze(-1)
    scale = scale if rest is None else scale * (-rest).exp()
    one_hot = torch.where(_one_hot(index, x.shape[-1], offset), taken.to(_wide(taken.dtype)).unsqueeze(-1), 0)
    return ((x.to(wide) - shift).exp() * scale - one_hot).to(x.dtype)


def _one_hot(index: torch.Tensor, size: int, offset: int) -> torch.Tensor:
    """True at column index - offset of [..., size]; nowhere in a row whose index is outside."""
    return torch.arange(size, device=index.device) == (index - offset).unsqueeze(-1)


KERNELS = {
    "logsumexp": Kernel(logsumexp, traced=_traced_logsumexp),
    "pick": Kernel(pick, traced=pick),
    "pick_backward": Kernel(pick_backward, traced=_traced_pick_backward),
    "cross_entropy_backward": Kernel(
        cross_entropy_backward,
        traced=_traced_cross_entropy_backward,
        in_place=((1, cross_entropy_backward_inplace),),
    ),
}
