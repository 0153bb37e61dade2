"""A model and its batch in the dtype that they are compared in, complex tensors in its complex one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Other than `Module.to`, which makes complex tensors real; and a module may have a `to` of its own.
_CASTS: Mapping[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float64: nn.Module.double, torch.float32: nn.Module.float,
    torch.float16: nn.Module.half, torch.bfloat16: nn.Module.bfloat16,
}  # fmt: skip


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A floating-point or complex tensor in `dtype`; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_complex():
        return leaf.to(dtype.to_complex())
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def module_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself, its parameters and buffers in `dtype`."""
    _CASTS[dtype](model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():
            tensor.data = cast(tensor.data, dtype)
    return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that a model computes in, of its first parameter; of a complex one that of its parts."""
    dtype = next(model.parameters()).dtype
    return dtype.to_real() if dtype.is_complex else dtype
