"""`autopar::expert_mm` and its backward: each row times the matrix of its expert, of which this rank holds those from
`offset` on.

Rows are brought together by expert, so that each matrix is read once (MegaBlocks, arXiv:2211.15841, without its padding
to blocks). Rows of experts that are not held give zeros and get no gradient: the sum over the ranks is the whole.
"""

from __future__ import annotations

import torch

from autopar.runtime.kernel import Kernel


def expert_mm(x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """x [s,k], w [g,k,n], index [s] -> [s,n]"""
    order, ends = _by_expert(index, w.shape[0], offset)
    rows, sums = x[order], x.new_empty((len(order), w.shape[2]))
    start = 0
    for matrix, end in zip(w, ends, strict=True):
        torch.mm(rows[start:end], matrix, out=sums[start:end])
        start = end
    out = x.new_zeros((x.shape[0], w.shape[2])) if len(order) < x.shape[0] else torch.empty_like(sums)
    return out.index_copy_(0, order, sums)


def expert_mm_backward(
    x: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, groups: int, *, offset: int = 0
) -> torch.Tensor:
    """x [s,k], grad [s,n], index [s] -> [groups,k,n]"""
    order, ends = _by_expert(index, groups, offset)
    rows, grads = x[order], grad[order]
    out = x.new_empty((groups, x.shape[1], grad.shape[1]))
    start = 0
    for matrix, end in zip(out, ends, strict=True):
        torch.mm(rows[start:end].T, grads[start:end], out=matrix)
        start = end
    return out


def _by_expert(index: torch.Tensor, groups: int, offset: int) -> tuple[torch.Tensor, list[int]]:
    """The rows of the experts that are here, in the order of these; where the rows of each expert end."""
    own = index - offset if offset else index
    own = torch.where((own < 0) | (own >= groups), groups, own)
    own, order = torch.sort(own, stable=True)
    experts = torch.arange(groups, device=own.device, dtype=own.dtype)
    ends = torch.searchsorted(own, experts, right=True).tolist()
    return order[: ends[-1]] if ends else order[:0], ends


# Opaque to a compiler: their sizes are data.
KERNELS = {"expert_mm": Kernel(expert_mm), "expert_mm_backward": Kernel(expert_mm_backward)}
