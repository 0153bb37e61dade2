"""Casts that a model writes: seen in a trace, or sent to another dtype, and the user's tensors with them; the dtype of
what names none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.capture.data.folding import FOLDED
from autopar.ir.ops.op_facts import QUERIES, writes_first

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_CASTS: dict[Any, torch.dtype] = {  # with the dtype that each names
    Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32,
    Tensor.double: torch.float64, Tensor.chalf: torch.complex32,
    Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
    Tensor.cdouble: torch.complex128,  # type: ignore[attr-defined]
}  # fmt: skip


TO_WIDE = (Tensor.float, Tensor.to, Tensor.type)
# Casts, what gives no tensor, and what torch itself makes of a tensor that it takes over, not in all runs alike.
_LEFT = frozenset(
    (Tensor.to, Tensor.type, Tensor.clone, Tensor.detach, torch.ops.aten.lift_fresh.default, *QUERIES, *FOLDED)
)


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


def of_dtype(
    func: Any, args: Any, kwargs: Any, dtype: torch.dtype, convert: Callable[[Any], Tensor]
) -> tuple[Any, Any]:
    """The arguments of a call, with `convert((tensor, wanted))` for each floating-point or complex tensor of another
    dtype: one that the user holds outside of parameters, buffers and batch, which no `model.to(dtype)` finds (an
    attribute, an item of a list, the class weights of a loss). What the call writes into stays the tensor it is; beside
    short floats all does, since ops themselves keep float32 beside them (the logsumexp of an attention)."""
    if dtype.itemsize < torch.float32.itemsize:
        return args, kwargs
    if func in _CASTS or func in _LEFT or _is_inner(getattr(func, "__name__", "")):
        return args, kwargs
    wanted = {True: dtype.to_complex(), False: dtype}

    first = args[:1] if writes_first(getattr(func, "__name__", "")) else ()
    changed = (_converted(value, wanted, convert) for value in args[len(first) :])
    kwargs = {key: value if key == "out" else _converted(value, wanted, convert) for key, value in kwargs.items()}
    return (*first, *changed), kwargs


def _converted(value: Any, wanted: dict[bool, torch.dtype], convert: Callable[[Any], Tensor]) -> Any:
    """The value with its tensors of another dtype converted. wanted: the dtype of those that are complex, and of those
    that are not. No function in a function: one that calls itself would keep the capture behind `convert`, with all its
    tensors, until Python looks for garbage."""
    if type(value) in (tuple, list):
        return type(value)([_converted(each, wanted, convert) for each in value])
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    to = wanted[value.is_complex()]
    return value if value.dtype is to else convert((value, to))


def _is_inner(name: str) -> bool:
    """True for what reads or sets an attribute of a tensor, and for what torch alone calls."""
    return name in ("__get__", "__set__") or (name.startswith("_") and not name.endswith("__"))


@contextmanager
def idle_autocast(device_type: str) -> Iterator[None]:
    """Autocast to float32, which changes nothing in a model of that dtype: it shows where the model turns it off."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Where a dtype is given, new tensors that name none have it as long as the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
