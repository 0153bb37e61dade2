"""Losses, normalisation and lookups, raised so that a piece of the batch or of the classes is right by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.functions import BatchNorm, CrossEntropy, Embedding
from autopar.ir.ops import op

Tensor = torch.Tensor


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    legacy = size_average is not None or reduce is not None
    if legacy or weight is not None or label_smoothing or target.is_floating_point():
        return NotImplemented
    x = input.movedim(1, -1) if input.ndim > 2 else input
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    losses = CrossEntropy.apply(x, op("checked_index")(target, x.shape[-1], ignore_index))
    return _reduce_valid(losses, target != ignore_index, reduction)


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    if size_average is not None or reduce is not None or weight is not None or input.ndim < 2:
        return NotImplemented
    x = input.movedim(1, -1)
    valid = target != ignore_index
    target = op("checked_index")(target, x.shape[-1], ignore_index)
    safe = torch.where(valid, target, 0)
    losses = -x.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    return _reduce_valid(losses, valid, reduction)


def _reduce_valid(losses: Tensor, valid: Tensor, reduction: str) -> Any:
    """The mean is a sum over a count, so that unevenly spread ignored labels weigh the same on any mesh."""
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / valid.sum().to(total.dtype)


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq or sparse or weight.ndim != 2:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Embedding.apply(weight, op("checked_index")(input, weight.shape[0], None), padding)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not training:
        assert running_mean is not None and running_var is not None
        shape = [input.shape[1] if dim == 1 else 1 for dim in range(input.ndim)]
        y = (input - running_mean.reshape(shape)) * (running_var + eps).rsqrt().reshape(shape)
        y = y if weight is None else y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)
    y, mean, variance = BatchNorm.apply(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        _move(running_mean, mean, momentum)
        _move(running_var, variance * (count / (count - 1)), momentum)
    return y


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is None or running_var is None:
        return NotImplemented
    inner = list(range(2, input.ndim))
    count = math.prod(input.shape[2:])
    mean = input.sum(inner, keepdim=True) / count
    variance = (input - mean).square().sum(inner, keepdim=True) / count
    # torch keeps the mean over the batch of what each instance would keep
    _move(running_mean, mean.flatten(1).sum(0) / len(input), momentum)
    _move(running_var, variance.flatten(1).sum(0) * (count / (count - 1) / len(input)), momentum)
    shape = [input.shape[1], *(1 for _ in inner)]
    y = (input - mean) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _move(running: Tensor, value: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.copy_(running * (1 - momentum) + value.detach() * momentum)


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


ELEMENTWISE = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
           F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div)  # fmt: skip
