"""`autopar::linear_scan`: a linear recurrence along a dim."""

from __future__ import annotations

import math

import torch

from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel

Tensor = torch.Tensor
ROW = 1024  # elements of a row: to call for a shorter one costs more than to compute it twice


def linear_scan(a: Tensor, b: Tensor, start: Tensor | None, dim: int, reverse: bool, *, runs: int = 1) -> Tensor:
    empty = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    a, b, out = (x.unflatten(dim, (runs, -1)).movedim(dim + 1, 0) for x in (a, b, empty))
    if not host.on_host(b) or b[0].numel() < ROW:
        _scan_blocks(a, b, start, out, reverse)
    else:
        _scan_rows(a, b, start, out, reverse)
    return empty


def _scan_rows(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor, reverse: bool) -> None:
    """Row by row, along dim 0."""
    factors, own, rows = a.unbind(), b.unbind(), out.unbind()
    state = start
    for t in reversed(range(len(rows))) if reverse else range(len(rows)):
        if state is None:
            rows[t].copy_(own[t])
        else:
            torch.addcmul(own[t], factors[t], state, out=rows[t])
        state = rows[t]


def _scan_blocks(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor, reverse: bool) -> None:
    """Blocks side by side, then from block to block: of so many rows that there are as many blocks. A device is asked
    for three times the root of the rows, and not for each."""
    rows = len(b)
    long = max(size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0)
    if long < 4:
        _scan_rows(a, b, start, out, reverse)
        return
    a, b, blocks = (x.unflatten(0, (rows // long, long)).movedim(1, 0) for x in (a, b, out))
    products, end = torch.empty_like(a), 0 if reverse else long - 1
    _scan_rows(a, b, None, blocks, reverse)
    _scan_rows(a, torch.zeros_like(a[:1]).expand_as(a), torch.ones_like(a[0]), products, reverse)
    ends = torch.empty_like(blocks[end])
    _scan_rows(products[end], blocks[end], start, ends, reverse)
    first = torch.zeros_like(ends[:1]) if start is None else start[None]
    before = torch.cat([ends[1:], first] if reverse else [first, ends[:-1]])
    blocks.addcmul_(products, before)


# Opaque: traced, it would be as long as the sequence.
KERNELS = {"linear_scan": Kernel(linear_scan)}
