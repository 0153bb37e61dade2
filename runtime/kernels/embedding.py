"""`autopar::embedding` and its backward, for a table of which this rank holds the rows from `offset` on.

An index outside of the held rows reads zeros and gets no gradient, so that the sum over the ranks is the lookup
in the whole table (the vocabulary-parallel embedding of Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

import torch

from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel


def embedding(weight: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """weight [rows, d], index [...] -> [..., d]"""
    rows, width = weight.shape
    flat = index.reshape(-1)
    if rows == 0 or flat.numel() == 0:
        return weight.new_zeros((*index.shape, width))
    if offset:
        flat = flat - offset
    if _all_inside(flat, rows):
        return weight.index_select(0, flat).view(*index.shape, width)
    row = flat.clamp(0, rows - 1)
    out = weight.index_select(0, row).masked_fill_((row != flat).unsqueeze(-1), 0)
    return out.view(*index.shape, width)


def embedding_backward(
    grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int, *, offset: int = 0
) -> torch.Tensor:
    """grad [*index, *rest], index [*index] -> [rows, *rest]; indices equal to `padding` (if >= 0, before the offset)
    give none."""
    rest = grad.shape[index.ndim :]
    flat = index.reshape(-1)
    if rows == 0 or grad.numel() == 0:
        return grad.new_zeros((rows, *rest))
    return _sums(grad.reshape(flat.numel(), -1), flat, rows, padding, offset).view(rows, *rest)


def add_embedding_gradient(
    total: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int, *, offset: int = 0
) -> torch.Tensor:
    """`total += embedding_backward(...)`, in place, row by row; `total` came from it."""
    flat = index.reshape(-1)
    if rows == 0 or grad.numel() == 0:
        return total
    row, source = flat - offset, grad.reshape(flat.numel(), -1)
    if padding >= 0 or not _all_inside(row, rows):
        left_out = (row < 0) | (row >= rows) | (flat == padding)  # no index is -1 but one that is outside
        row, source = row.clamp(0, rows - 1), source.masked_fill(left_out.unsqueeze(1), 0)
    total.view(rows, -1).index_add_(0, row, source)
    return total


def _sums(grad: torch.Tensor, flat: torch.Tensor, rows: int, padding: int, offset: int) -> torch.Tensor:
    row = flat - offset if offset else flat
    ignored = padding - offset if padding >= 0 else -1
    if not _all_inside(row, rows):
        # `ignored` may lie outside of this piece: then nothing in it is padding, and -1 says so for all the rest.
        inside = 0 <= ignored < rows
        outside = (row < 0) | (row >= rows)
        if inside:
            row = row.masked_fill(outside, ignored)
        else:
            # No row of this piece is free to be ignored: give the gradients outside a row of their own and drop it.
            row = row.masked_fill(outside, rows)
            return torch.ops.aten.embedding_dense_backward(grad, row, rows + 1, rows, False)[:rows]
    elif not 0 <= ignored < rows:
        ignored = -1
    return torch.ops.aten.embedding_dense_backward(grad, row, rows, ignored, False)


def _all_inside(row: torch.Tensor, rows: int) -> bool:
    """True if known that no index is outside. Off the CPU the question would wait for the device: say no."""
    if not host.on_host(row):
        return False
    low, high = torch.aminmax(row)
    return low.item() >= 0 and high.item() < rows


def _traced_embedding(weight: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    rows = weight.shape[0]
    if rows == 0 or index.numel() == 0:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    row = index - offset
    found = torch.ops.aten.embedding(weight, row.clamp(0, rows - 1))
    return torch.where(((row >= 0) & (row < rows)).unsqueeze(-1), found, 0)


KERNELS = {
    "embedding": Kernel(embedding, traced=_traced_embedding),
    # Opaque to a compiler: Inductor would add the rows up by atomics, in any order.
    "embedding_backward": Kernel(embedding_backward, adding=add_embedding_gradient),
}
