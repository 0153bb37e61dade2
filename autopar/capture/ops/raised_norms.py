"""Normalisation with statistics of the samples: of the whole batch, or of groups of it.

Calls need to know the module that makes them, if one of torch's norms does: a SyncBatchNorm takes the statistics of all
ranks, and a momentum of None means an average that counts its updates in a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.ops.functions import BatchNorm, GroupedBatchNorm, widened
from autopar.ir.ops.ops import op

Tensor = torch.Tensor

_FRAMES = 4  # from a call up to the method of a module that makes it: torch.overrides stands between


@dataclass(frozen=True, slots=True)
class Norm:
    """Which norm makes a call. statistics: as the option `batch_statistics`. module: of torch's, if it is one."""

    statistics: str = "batch"
    module: nn.Module | None = None

    @property
    def is_synced(self) -> bool:
        """True for one that takes the statistics of all ranks."""
        return isinstance(self.module, nn.SyncBatchNorm)

    @property
    def has_groups(self) -> bool:
        """True if statistics are those of groups of samples."""
        return self.statistics == "microbatch" or (self.statistics == "rank" and not self.is_synced)

    @property
    def count(self) -> Tensor | None:
        """The number of updates, of which a running statistic is the mean; None if each weighs as much as the last."""
        is_mean = self.module is not None and self.module.momentum is None
        return self.module.num_batches_tracked if is_mean else None  # type: ignore[union-attr, return-value]

    def batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        """Raise F.batch_norm to sums over samples and pointwise ops; running statistics are written too."""
        if not training:
            assert running_mean is not None and running_var is not None
            shape = [input.shape[1] if dim == 1 else 1 for dim in range(input.ndim)]
            y = (widened(input) - running_mean.reshape(shape)) * (widened(running_var) + eps).rsqrt().reshape(shape)
            y = y if weight is None else y * weight.reshape(shape)
            return (y if bias is None else y + bias.reshape(shape)).to(input.dtype)
        count = input.numel() // input.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")

        def move(mean: Tensor, variance: Tensor) -> None:
            if running_mean is not None and running_var is not None:
                self._move(running_mean, mean, momentum)
                self._move(running_var, variance if self.has_groups else variance * (count / (count - 1)), momentum)

        if self.has_groups:
            return GroupedBatchNorm.apply(input, weight, bias, eps, self.is_synced, move)
        return BatchNorm.apply(input, weight, bias, eps, move)

    def instance_norm(
        self, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        """Raise F.instance_norm with running statistics to sums and pointwise ops. NotImplemented without them: torch's
        own op is per sample already."""
        if not use_input_stats:
            return self.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if running_mean is None or running_var is None:
            return NotImplemented
        inner = list(range(2, input.ndim))
        count = math.prod(input.shape[2:])
        wide = widened(input)
        mean = wide.sum(inner, keepdim=True) / count
        variance = (wide - mean).square().sum(inner, keepdim=True) / count
        shape = [input.shape[1], *(1 for _ in inner)]
        y = (wide - mean) * (variance + eps).rsqrt()
        y = y if weight is None else y * weight.reshape(shape)
        # torch keeps the mean over the batch of what each instance would keep; last, where a checkpoint has ended
        self._move(running_mean, self._over_samples(mean.flatten(1)), momentum)
        self._move(running_var, self._over_samples(variance.flatten(1), count / (count - 1)), momentum)
        return (y if bias is None else y + bias.reshape(shape)).to(input.dtype)

    def _over_samples(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """The mean over samples, those of the whole batch or of each group, times a factor."""
        if not self.has_groups:
            return values.sum(0) * (factor / len(values)) if factor != 1.0 else values.sum(0) / len(values)
        with torch.no_grad():
            mean = op("in_groups")(values.detach(), False).sum([0, 2], keepdim=True) / len(values)
            return mean * factor

    def _move(self, running: Tensor, value: Tensor, momentum: float) -> None:
        """Write a running statistic. value: with the dims of `in_groups`, if there are groups."""
        with torch.no_grad():
            value, count = value.detach(), self.count
            if self.has_groups:
                running.copy_(op("running_average")(running, value, count, 0.0 if count is not None else momentum))
                return
            factor = momentum if count is None else count.to(value.dtype).reciprocal()
            running.copy_(running * (1 - factor) + value * factor)


def norm_of(frame: FrameType | None) -> nn.Module | None:
    """The batch norm of torch, or of a subclass, in a method of which a call is made."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        module = frame.f_locals.get("self")
        if isinstance(module, nn.modules.batchnorm._NormBase):
            return module if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
        frame = frame.f_back
    return None


def is_count(tensor: Any, frame: FrameType) -> bool:
    """True where a batch norm reads how many updates it made, to weigh one more: that is done with the tensor."""
    module = norm_of(frame)
    return module is not None and module.momentum is None and tensor is module.num_batches_tracked


# Of torch's functions: what is called in their place, which takes the norm first.
NORMS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: Norm.batch_norm,
    torch.batch_norm: lambda norm, x, weight, bias, mean, variance, *rest: norm.batch_norm(
        x, mean, variance, weight, bias, *rest[:3]
    ),
    F.instance_norm: Norm.instance_norm,
}
