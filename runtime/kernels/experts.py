"""`autopar::expert_mm` and its backward: each row times the matrix of its expert, of which this rank holds those from
`offset` on.

Rows are brought together by expert, so that each matrix is read once (MegaBlocks, arXiv:2211.15841). How many an expert
has is known to the device alone: a host that asked would wait for all that is in its queue, in every product. So shapes
do not depend on it. Each expert's rows take a multiple of some number, those of experts that are not held lie behind
all others, and the products are one grouped call with offsets on the device, or one batched call over blocks of rows. A
CPU is asked for nothing: there the products are a loop.

Rows of experts that are not held give zeros and get no gradient: the sum over the ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel
from autopar.torch_compat import GROUPED_MM

ALIGNED = 8  # of bf16: rows, columns and an expert's rows start at multiples of 16 bytes, as grouped kernels want it


ByExpert = Callable[[torch.Tensor, int], tuple[torch.Tensor | None, list[int]]]


def in_order(own: torch.Tensor) -> bool:
    """True if rows lie by expert, as those do that came from other ranks."""
    return bool((own[1:] >= own[:-1]).all())


def by_expert(own: torch.Tensor, groups: int) -> tuple[torch.Tensor | None, list[int]]:
    """The rows of the experts that are here, in the order of these, None if they lie so; where those of each end."""
    order = None
    if not in_order(own):
        own, order = torch.sort(own, stable=True)
    experts = torch.arange(groups, device=own.device, dtype=own.dtype)
    ends = torch.searchsorted(own, experts, right=True).tolist()
    return None if order is None else order[: ends[-1]] if ends else order[:0], ends


def expert_mm(
    x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *, offset: int = 0, by_expert: ByExpert = by_expert
) -> torch.Tensor:
    """x [s,k], w [g,k,n], index [s] -> [s,n]. by_expert: brings rows together on a CPU."""
    groups, _, columns = w.shape
    own = _own(index, groups, offset)
    if not is_grouped(x, columns) and host.on_host(x):
        return _loop(x, w, *by_expert(own, groups))
    found = _Grouped.of(own, groups, _grain(x, columns, groups))
    rows = found.spread(x)
    if is_grouped(x, columns):
        sums = GROUPED_MM(rows, _dense(w), offs=found.ends)
    else:
        blocks = torch.bmm(rows.view(-1, found.grain, x.shape[1]), w[found.block().clamp_(max=groups - 1)])
        sums = blocks.view(-1, columns)
    return sums[found.places].masked_fill_((own == groups).unsqueeze(1), 0)


def expert_mm_backward(
    x: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, groups: int, *, offset: int = 0,
    by_expert: ByExpert = by_expert,
) -> torch.Tensor:  # fmt: skip
    """x [s,k], grad [s,n], index [s] -> [groups,k,n]"""
    own = _own(index, groups, offset)
    if not is_grouped(x, grad.shape[1]) and host.on_host(x):
        return _loop_backward(x, grad, groups, *by_expert(own, groups))
    found = _Grouped.of(own, groups, _grain(x, grad.shape[1], groups))
    rows, grads = found.spread(x), found.spread(grad)
    if is_grouped(x, grad.shape[1]):
        return GROUPED_MM(rows.t(), grads, offs=found.ends)
    products = torch.bmm(rows.view(-1, found.grain, x.shape[1]).mT, grads.view(-1, found.grain, grad.shape[1]))
    out = products.new_zeros((groups + 1, *products.shape[1:]))
    return out.index_add_(0, found.block(), products)[:groups]


def is_grouped(x: torch.Tensor, columns: int) -> bool:
    """Whether torch's grouped product takes rows like x and gives so many columns, without asking the host."""
    if x.dtype != torch.bfloat16 or x.shape[1] % ALIGNED or columns % ALIGNED:
        return False
    # On older devices, and on small ones, torch has a loop that reads the offsets.
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] in (9, 10)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rows brought together by expert, in `size` places. Each expert has a multiple of `grain`, and at least that: the
    kernels leave what an expert without rows gets as it was.

    ends: of each expert, in int32. places: of each row; those of no expert here are behind all others.
    """

    size: int
    grain: int
    ends: torch.Tensor
    places: torch.Tensor

    @staticmethod
    def of(own: torch.Tensor, groups: int, grain: int) -> _Grouped:
        """Group rows by the expert of each; `groups` for one that is not here."""
        ordered, order = torch.sort(own, stable=True)
        every = torch.arange(groups + 1, device=own.device, dtype=own.dtype)
        starts = torch.searchsorted(ordered, every)
        counts = starts.diff()
        ends = torch.div(counts + (grain - 1), grain, rounding_mode="floor").clamp_(min=1).mul_(grain).cumsum(0)
        moved = torch.cat([ends.new_zeros(1), ends]) - starts
        there = torch.arange(len(own), device=own.device) + moved[ordered]
        size = -(-(len(own) + groups * grain) // grain) * grain
        return _Grouped(size, grain, ends.to(torch.int32), torch.empty_like(there).index_copy_(0, order, there))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The rows in their places, zeros in the others."""
        return x.new_zeros((self.size, x.shape[1])).index_copy_(0, self.places, x)

    def block(self) -> torch.Tensor:
        """The expert of each `grain` places."""
        first = torch.arange(0, self.size, self.grain, device=self.ends.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, first, right=True)


def _grain(x: torch.Tensor, columns: int, groups: int) -> int:
    """Blocks of as many rows as an expert has on average: at most twice the products, and twice the matrices."""
    return ALIGNED if is_grouped(x, columns) else max(1, -(-x.shape[0] // max(1, groups)))


def _own(index: torch.Tensor, groups: int, offset: int) -> torch.Tensor:
    """The expert of each row among those that are here; `groups` for others."""
    own = index - offset if offset else index
    return torch.where((own < 0) | (own >= groups), groups, own)


def _dense(w: torch.Tensor) -> torch.Tensor:
    return w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()


def _loop(x: torch.Tensor, w: torch.Tensor, order: torch.Tensor | None, ends: list[int]) -> torch.Tensor:
    count = ends[-1] if ends else 0
    out = x.new_zeros((x.shape[0], w.shape[2])) if count < x.shape[0] else x.new_empty((count, w.shape[2]))
    rows, sums = (x, out) if order is None else (x[order], x.new_empty((count, w.shape[2])))
    start = 0
    for matrix, end in zip(w, ends, strict=True):
        torch.mm(rows[start:end], matrix, out=sums[start:end])
        start = end
    return out if order is None else out.index_copy_(0, order, sums)


def _loop_backward(
    x: torch.Tensor, grad: torch.Tensor, groups: int, order: torch.Tensor | None, ends: list[int]
) -> torch.Tensor:
    rows, grads = (x, grad) if order is None else (x[order], grad[order])
    out = x.new_empty((groups, x.shape[1], grad.shape[1]))
    start = 0
    for matrix, end in zip(out, ends, strict=True):
        torch.mm(rows[start:end].T, grads[start:end], out=matrix)
        start = end
    return out


# Opaque to a compiler: a product over groups is no template of its.
KERNELS = {"expert_mm": Kernel(expert_mm), "expert_mm_backward": Kernel(expert_mm_backward)}
