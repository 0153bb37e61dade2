"""`autopar::rms_norm` and its backward: x / sqrt(mean(x^2) + eps) * weight over the dims of the weight
(Zhang and Sennrich 2019, arXiv:1910.07467).

On CUDA torch's fused kernels. It has none for other devices: there a few passes over x, none of whose results is kept
but the factor of each row.
"""

from __future__ import annotations

import torch

from autopar.ir.ops import ops
from autopar.runtime.kernels.kernel import Kernel

_aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """(y in x's dtype, the factor of each row in at least float32)."""
    if x.device.type == "cuda":
        return fused(x, weight, eps)
    if x.device.type == "meta":  # in place of a GPU: no memory but that of the results
        made: Pair = ops.rms_norm.meta(x, weight, eps)
        return made
    return _plain(x, weight, eps)


def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> Pair:
    """(dx, dweight)"""
    if x.device.type == "cuda":
        return fused_backward(grad, x, weight, factor)
    if x.device.type == "meta":
        made: Pair = ops.rms_norm_backward.meta(grad, x, weight, factor)
        return made
    return _plain_backward(grad, x, weight, factor)


def fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    y, factor = _aten._fused_rms_norm.default(x.contiguous(), list(weight.shape), weight.contiguous(), eps)
    return y, factor


def fused_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> Pair:
    operands = grad.contiguous(), x.contiguous(), list(weight.shape), factor.contiguous(), weight.contiguous()
    dx, dweight = _aten._fused_rms_norm_backward.default(*operands, [True, True])
    return dx, dweight


def _plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    wide = x.to(torch.float32) if x.dtype.itemsize == 2 else x
    factor = wide.square().mean(_dims(weight), keepdim=True).add_(eps).rsqrt_()
    return (wide * factor).mul_(weight).to(x.dtype), factor


def _plain_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> Pair:
    normal, scaled = x * factor, grad * weight.to(factor.dtype)
    dweight = (grad * normal).flatten(0, x.ndim - weight.ndim - 1).sum(0) if x.ndim > weight.ndim else grad * normal
    along = (scaled * normal).mean(_dims(weight), keepdim=True)
    dx = normal.mul_(along).neg_().add_(scaled).mul_(factor)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _dims(weight: torch.Tensor) -> list[int]:
    return list(range(-weight.ndim, 0))


def in_groups(x: torch.Tensor, synced: bool, like: torch.Tensor | None = None) -> torch.Tensor:
    """x with the dims of one group, or of those of `like`."""
    return x.reshape((1, 1, *x.shape) if like is None else like.shape)


def in_microbatches(x: torch.Tensor, count: int) -> torch.Tensor:
    """x as the micro-batches of all data ranks."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def running_average(
    running: torch.Tensor, values: torch.Tensor, count: torch.Tensor | None, momentum: float
) -> torch.Tensor:
    """The statistic after one update."""
    factor = momentum if count is None else count.to(running.dtype).reciprocal()
    return (running * (1 - factor) + values.reshape(running.shape) * factor).to(running.dtype)


# A compiler fuses the parts with what stands around them.
KERNELS = {
    "in_groups": Kernel(in_groups, traced=in_groups),
    "in_microbatches": Kernel(in_microbatches, traced=in_microbatches),
    "running_average": Kernel(running_average, traced=running_average),
    "rms_norm": Kernel(rms_norm, traced=_plain),
    "rms_norm_backward": Kernel(rms_norm_backward, traced=_plain_backward),
}
