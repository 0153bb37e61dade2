"""Tensors that are made of numbers of which some are inputs: `torch.tensor([n, 2.0])`, `torch.full_like(x, n)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Spelling = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor)
_FILLED = (torch.full, torch.full_like, Tensor.new_full)
_GIVEN = ("size", "input", "data", "obj", "fill_value")  # by name, in the order of their places
_OPTIONS = frozenset(("dtype", "device"))


def is_making(function: Any) -> bool:
    """True for a function that makes a tensor of numbers."""
    return function in _OF_DATA or function in _FILLED


def as_tensors(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], tensor: Callable[[Any], Any]
) -> Spelling | None:
    """The call that makes the same of tensors in place of numbers; None where there is none.

    tensor: the tensor [] that stands for a number; anything else as it is. A dtype that is not said is that of Python's
    numbers in torch: int64, or the default one."""
    if not kwargs.keys() <= _OPTIONS | set(_GIVEN):
        return None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    given = [*args, *(kwargs[name] for name in _GIVEN if name in kwargs)]
    if function in (Tensor.new_tensor, Tensor.new_full):
        like, *given = given
        dtype, device = dtype or like.dtype, device or like.device
    if function in _OF_DATA:
        return _of_data(given[0], dtype, device, tensor) if len(given) == 1 else None
    if len(given) != 2:
        return None
    value = tensor(given[1])
    if function is torch.full_like:
        dtype, zeros = dtype or given[0].dtype, torch.zeros_like(given[0], dtype=dtype, device=device)
    else:
        dtype = dtype or _dtype_of([value])
        zeros = torch.zeros(given[0], dtype=dtype, device=device or value.device)
    return torch.add, (zeros, value.to(dtype)), {}


def _of_data(data: Any, dtype: Any, device: Any, tensor: Callable[[Any], Any]) -> Spelling | None:
    if not isinstance(data, (list, tuple)):
        value = tensor(data)
        options = {"dtype": dtype or _dtype_of([value]), "device": device or value.device, "copy": True}
        return Tensor.to, (value,), options
    values = [tensor(item) for item in data]
    if any(isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) for value in values):
        return None
    dtype, device = dtype or _dtype_of(values), device or next(v.device for v in values if isinstance(v, Tensor))
    parts = [
        value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)
        for value in values
    ]
    return torch.stack, (parts,), {}


def _dtype_of(values: Sequence[Any]) -> torch.dtype:
    """The dtype of a tensor of Python's numbers."""
    floats = (v.is_floating_point() if isinstance(v, Tensor) else isinstance(v, float) for v in values)
    return torch.get_default_dtype() if any(floats) else torch.int64
