"""Losses, norms of rows and lookups, raised so that a piece of the batch or of the classes is right by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from autopar.capture.ops.functions import (
    CrossEntropy,
    CTCLoss,
    Einsum,
    Embedding,
    LogSoftmax,
    Pick,
    RMSNorm,
    SmoothedCrossEntropy,
)
from autopar.capture.ops.raised_products import linear
from autopar.ir.ops.ops import op

Tensor = torch.Tensor


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Raise F.cross_entropy to logsumexp and pick, whose classes may be split; a mean becomes a sum over a count.

    Targets are class numbers, or probabilities: NotImplemented for these with an ignore_index that could be a class.
    """
    how = _reduction(reduction, size_average, reduce)
    x = input.movedim(1, -1) if input.ndim > 2 else input
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.float()
    if target.is_floating_point():
        return NotImplemented if ignore_index >= 0 else _of_probabilities(x, target, weight, label_smoothing, how)
    index = op("checked_index")(target, x.shape[-1], ignore_index)
    valid = target != ignore_index
    weight, counts = _counts(weight, index, valid, x.dtype)
    if label_smoothing:
        near = 1.0 - label_smoothing if weight is None else counts * (1.0 - label_smoothing)
        losses = SmoothedCrossEntropy.apply(x, index, weight, near, label_smoothing / x.shape[-1])
    else:
        losses = CrossEntropy.apply(x, index)
        losses = losses if weight is None else losses * counts
    return _reduce_valid(losses, valid, counts, how)


def _of_probabilities(x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, reduction: str) -> Any:
    """-sum_c q_c log softmax(x)_c, where q are the targets, smoothed and weighted."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    q = target.movedim(1, -1) if target.ndim > 2 else target
    q = (q * (1.0 - smoothing) + smoothing / x.shape[-1] if smoothing else q).to(wide)
    q = q if weight is None else q * weight.detach()
    names = "abcdefgh"[: x.ndim]
    with torch.autocast(x.device.type, enabled=False):  # torch's kernel makes no product of it
        losses = -Einsum.apply(LogSoftmax.apply(x.to(wide)), q.to(wide), f"{names},{names}->{names[:-1]}").to(x.dtype)
    if reduction == "none":
        return losses
    return losses.sum() / losses.numel() if reduction == "mean" else losses.sum()


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Raise F.nll_loss to pick and a sum over a count."""
    x = input.movedim(1, -1) if input.ndim > 2 else input
    index = op("checked_index")(target, x.shape[-1], ignore_index)
    valid = target != ignore_index
    weight, counts = _counts(weight, index, valid, x.dtype)
    losses = -Pick.apply(x, index)
    losses = losses if weight is None else losses * counts
    return _reduce_valid(losses, valid, counts, _reduction(reduction, size_average, reduce))


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Targets that stand in one row, one after the other, are put in a row each, of the only length that is known."""
    if log_probs.ndim != 3 or targets.ndim not in (1, 2) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    device = log_probs.device
    lengths, counts = (torch.as_tensor(given, device=device) for given in (input_lengths, target_lengths))
    if targets.ndim == 1:
        places = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(len(targets), device=device)
        targets = targets[places.clamp(max=len(targets) - 1)]
    losses = CTCLoss.apply(log_probs, targets, lengths, counts, blank, zero_infinity)
    losses = torch.where(losses == math.inf, 0.0, losses) if zero_infinity else losses
    if reduction == "none":
        return losses
    return (losses / counts.clamp(min=1)).sum() / len(losses) if reduction == "mean" else losses.sum()


def log_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3
) -> Any:
    """Raise F.log_softmax to x - logsumexp(x). NotImplemented without a dim, and for results in 16 bits: torch rounds
    these once, two ops would twice."""
    autocast = torch.is_autocast_enabled(input.device.type)
    wide = dtype or (torch.float32 if autocast and input.dtype != torch.float64 else input.dtype)
    if dim is None or input.ndim == 0 or wide not in (torch.float32, torch.float64):
        return NotImplemented
    return LogSoftmax.apply(input.to(wide).movedim(dim, -1)).movedim(-1, dim)


def _counts(weight: Tensor | None, index: Tensor, valid: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """The class weights, and what each label counts in a mean: the weight of its class, or one; nothing if ignored."""
    if weight is None:
        return None, valid
    weight = weight.detach().to(dtype)
    place = torch.where(valid, index, 0)
    found = weight[place if place.ndim else place.reshape(1)].reshape(index.shape)
    return weight, torch.where(valid, found, 0.0)


def _reduction(reduction: str, size_average: Any, reduce: Any) -> str:
    """What the two arguments of old mean, if one is given."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        return "none"
    return "mean" if size_average is None or size_average else "sum"


def _reduce_valid(losses: Tensor, valid: Tensor, counts: Tensor, reduction: str) -> Any:
    """The mean is a sum over a count, so that unevenly spread ignored labels weigh the same on any mesh."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum().to(total.dtype)


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """Raise F.embedding to a lookup whose table may be split by rows. NotImplemented for the options that change or
    count rows (max_norm, scale_grad_by_freq) and for sparse gradients."""
    if max_norm is not None or scale_grad_by_freq or sparse or weight.ndim != 2:
        return NotImplemented
    if input.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"the indices of an embedding are {input.dtype}: give torch.int64 or torch.int32.")
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Embedding.apply(weight, op("checked_index")(input, weight.shape[0], None), padding)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """Raise F.rms_norm, which torch takes apart but on a GPU. NotImplemented without a weight, with one of another
    dtype, or of complex numbers."""
    shape = tuple(normalized_shape)
    if weight is None or weight.shape != shape or input.dtype != weight.dtype or input.shape[-len(shape) :] != shape:
        return NotImplemented
    if input.is_complex():
        return NotImplemented
    return RMSNorm.apply(input, weight, torch.finfo(input.dtype).eps if eps is None else float(eps))


def with_reduction(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """An elementwise loss: computed unreduced, then summed or averaged."""

    def raised(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.pop("reduction", "mean")
        legacy = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        if args or legacy or reduction not in ("mean", "sum"):
            return NotImplemented
        losses = function(input, target, **kwargs, reduction="none")
        return losses.sum() / losses.numel() if reduction == "mean" else losses.sum()

    return raised


def smooth_l1_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Raise F.smooth_l1_loss as the other elementwise losses, and look at beta, which torch's kernels do alone."""
    beta = args[3] if len(args) > 3 else kwargs.get("beta", 1.0)
    if beta < 0:
        raise RuntimeError(f"smooth_l1_loss does not support negative values for beta: it is {beta}.")
    return _smooth_l1(input, target, *args, **kwargs)


_smooth_l1 = with_reduction(F.smooth_l1_loss)


def gaussian_nll_loss(
    run: Callable[..., Any], input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Raise F.gaussian_nll_loss to what torch's own computes, whose look for negative variances becomes a branch of the
    step's, by `run` (a function and its arguments): each step checks it before anything is changed. Errors are torch's.
    """
    if isinstance(var, float):
        negative, var = var < 0, var * torch.ones_like(input)
    else:
        negative = run(Tensor.__bool__, run(torch.any, run(torch.lt, var, 0)))
    if negative:
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape:
        others = [own for own, size in zip(var.shape, input.shape, strict=False) if own != size]
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.ndim != input.ndim or others != [1]:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = var.clone()
    with torch.no_grad():  # what is clamped has its gradient
        var.clamp_(min=eps)
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    if reduction == "none":
        return losses
    return losses.sum() / losses.numel() if reduction == "mean" else losses.sum()


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: Any = None,
) -> Any:  # fmt: skip
    """`options` say in which pieces torch computes it, and nothing of the result."""
    if linear_weight.ndim != 2 or input.ndim not in (1, 2):
        return NotImplemented
    ignored = -100 if ignore_index is None else ignore_index
    logits = linear(input, linear_weight, linear_bias)
    if logits is NotImplemented:
        return NotImplemented
    return cross_entropy(
        logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing
    )
