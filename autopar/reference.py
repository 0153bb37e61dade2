"""The plain module on one device, as the other side of `verify`: in one dtype, or as torch.autocast runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import LossFn, loss_of
from autopar.capture.raising import Raise, default_dtype
from autopar.comparison import Table, Values
from autopar.ir.plan import Memory
from autopar.torch_compat import backward, tree_map

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SCALE = 256.0  # of the loss, where gradients in fp16 are compared


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in `dtype`; anything else as it is."""
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Plain:
    """The user's module, trained as it is; with `autocast` as under torch.autocast in that dtype."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory, autocast: torch.dtype | None = None
    ) -> None:
        self.model, self.loss_fn, self.autocast = model, loss_fn, autocast
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        args, kwargs = tree_map(_copied, (args, dict(kwargs)))  # the model may write into them
        parameter = next(self.model.parameters())
        dtype, low = parameter.dtype, self.autocast
        scale = SCALE if low is torch.float16 else 1.0
        with default_dtype(dtype), Raise(None, seed, None if low else dtype):
            with torch.autocast(parameter.device.type, low) if low else nullcontext():
                if self.loss_fn is None:
                    loss = loss_of(self.model(*args, **kwargs))
                else:
                    loss = self.loss_fn(self.model, *args, **kwargs)
            backward(loss * scale if scale != 1.0 else loss)
        found: Values = {("loss", "loss"): loss.detach()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
                found["gradient", name] = parameter.grad.clone()
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            found["weight", name] = parameter.detach().clone()
        for name, tensor in self.model.named_buffers():
            found["buffer", name] = tensor.clone()
        return found


class Reference:
    """What a step should give, and how far from it a step may be.

    The programs of a precision are compared with the plain module in float64: no tensor may be further from it than
    twice what torch.autocast is on one device, or than a rounding of the short float.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory, memory: Memory) -> None:
        self.short = short_of(memory)
        exact = copy.deepcopy(model)
        self.plain = Plain(exact if self.short is None else exact.double(), loss_fn, make)
        self.other = Plain(copy.deepcopy(model), loss_fn, make, memory.low_dtype) if memory.low_dtype else None
        self.dtype = next(model.parameters()).dtype
        sums_are_short = memory.reduce_dtype.itemsize < 4
        self.table = Table.of(self.dtype) if self.short is None else Table.of(self.short, 1 + sums_are_short)

    @property
    def note(self) -> str:
        """What the report says of the comparison."""
        if self.short is None:
            return ""
        told = ", or twice the error of torch.autocast" if self.other else ""
        return f"{str(self.short).removeprefix('torch.')} against float64{told}"

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        """What the plain module gives."""
        self.allowed = self.other.step(args, kwargs, seed) if self.other else {}
        if self.short is not None:
            args, kwargs = tree_map(lambda leaf: cast(leaf, torch.float64), (args, dict(kwargs)))
        return self.plain.step(args, kwargs, seed)

    def compare(self, expected: Values, given: Values, replicas: Mapping[tuple[str, str], float]) -> None:
        """Enter a step in the table."""
        self.table.compare(expected, given, replicas, self.allowed)


def short_of(memory: Memory) -> torch.dtype | None:
    """The shortest dtype that the programs of a plan compute or sum in; None if they compute as the model is."""
    if memory.sums_dtype is None:
        return None
    return memory.low_dtype or memory.reduce_dtype
