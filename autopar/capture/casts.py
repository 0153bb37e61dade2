"""Casts that a model writes: seen in a trace, or sent to another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_CASTS: dict[Any, torch.dtype] = {  # with the dtype that each names
    Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32,
    Tensor.double: torch.float64, Tensor.chalf: torch.complex32,
    Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
    Tensor.cdouble: torch.complex128,  # type: ignore[attr-defined]
}  # fmt: skip


TO_WIDE = (Tensor.float, Tensor.to, Tensor.type)


def traced(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A cast from float32 to float32 as a copy, which a trace shows."""
    dtypes = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    wanted = torch.float32 if func is Tensor.float else next(iter(dtypes), None)
    if args[0].dtype is wanted is torch.float32:
        return Tensor.to, (args[0], wanted), {"copy": True}
    return func, args, kwargs


def lifted(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The same call with every floating-point dtype in it replaced, and every complex one by that of its size."""
    if func in _CASTS:
        func, args, kwargs = Tensor.to, (args[0], _CASTS[func]), {}
    instead = {**dict.fromkeys(_FLOATS, dtype), **dict.fromkeys(_COMPLEX, dtype.to_complex())}
    args = tuple(instead.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
    return func, args, {k: instead.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
