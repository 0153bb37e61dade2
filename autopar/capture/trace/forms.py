"""Infer the form of what common ops give, where that follows from the forms of their operands in a line.

torch infers it by code that is made for everything: a `gelu` on tensors without data is some forty calls of other ops,
and a layer norm a hundred. Here only what is dense is answered, and all else is left to torch.
tests/capture/test_forms.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor
_REAL = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The form of a tensor that an op made. view_of: the place among the operands of the one whose memory it shows;
    None for memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None


Infer = Callable[..., "tuple[TensorForm | None, ...] | None"]


@lru_cache(1 << 14)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of dense memory."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def infer(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[TensorForm | None, ...] | None:
    """The forms of the results of an op; None where it is left to torch. The operands are of one fake mode."""
    rule = _RULES.get(func)
    return rule(*args, **kwargs) if rule is not None else None


def _is_dense(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and 0 not in tensor.shape and tensor.stride() == strides_of(tensor.shape)


def _fresh(shape: tuple[int, ...], like: Any) -> TensorForm:
    return TensorForm(shape, strides_of(shape), 0, like.dtype, like.fake_device, None)


def _view(x: Any, size: Sequence[int]) -> tuple[TensorForm, ...] | None:
    rest = math.prod(each for each in size if each != -1)
    if not _is_dense(x) or not rest or size.count(-1) > 1 or x.numel() % rest:
        return None
    shape = tuple(x.numel() // rest if each == -1 else each for each in size)
    if math.prod(shape) != x.numel() or min(shape, default=1) < 1:
        return None
    return (TensorForm(shape, strides_of(shape), x.storage_offset(), x.dtype, x.fake_device, 0),)


def _permute(x: Any, dims: Sequence[int]) -> tuple[TensorForm, ...] | None:
    order = [dim % max(x.dim(), 1) for dim in dims]
    if sorted(order) != list(range(x.dim())) or any(not -x.dim() <= dim < x.dim() for dim in dims):
        return None
    shape, stride = tuple(x.shape[dim] for dim in order), tuple(x.stride()[dim] for dim in order)
    return (TensorForm(shape, stride, x.storage_offset(), x.dtype, x.fake_device, 0),)


def _transpose(x: Any, one: int, other: int) -> tuple[TensorForm, ...] | None:
    n = x.dim()
    if not n or not -n <= one < n or not -n <= other < n:
        return None
    order = list(range(n))
    order[one % n], order[other % n] = other % n, one % n
    return _permute(x, order)


def _new_empty(x: Any, size: Sequence[int], *, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    shape = tuple(size)
    if not _is_usual(x, rest) or min(shape, default=1) < 1:
        return None
    return (TensorForm(shape, strides_of(shape), 0, dtype or x.dtype, x.fake_device, None),)


def _empty_like(x: Any, *, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    return _new_empty(x, x.shape, dtype=dtype, **rest) if _is_dense(x) else None


def _is_usual(x: Any, options: Mapping[str, Any]) -> bool:
    """True for options of a new tensor that say what holds without them."""
    usual = {
        "device": (None, x.fake_device), "layout": (None, torch.strided), "pin_memory": (None, False),
        "memory_format": (None, torch.preserve_format),
    }  # fmt: skip
    return all(value in usual.get(name, ()) for name, value in options.items())


def _expand(x: Any, size: Sequence[int], **rest: Any) -> Any:
    new = len(size) - x.dim()
    if rest or new < 0 or -1 in size[:new] or 0 in size:
        return None
    old, strides = (*[1] * new, *x.shape), (*[0] * new, *x.stride())
    shape = tuple(was if each == -1 else each for was, each in zip(old, size, strict=True))
    if any(was not in (1, each) for was, each in zip(old, shape, strict=True)):
        return None
    kept = zip(old, shape, strides, strict=True)
    stride = tuple(0 if was != each else by for was, each, by in kept)
    if new and 1 in size[:new]:
        return None  # strides of dims of size 1 follow those beside them
    return (TensorForm(shape, stride, x.storage_offset(), x.dtype, x.fake_device, 0),)


def _sum(x: Any, dims: Sequence[int] | None, keepdim: bool = False, **rest: Any) -> Any:
    n = x.dim()
    if rest or not dims or not n or x.dtype not in _REAL or not _is_dense(x) or not all(-n <= dim < n for dim in dims):
        return None
    summed = {dim % n for dim in dims}
    if len(summed) < len(dims):
        return None
    sizes = enumerate(x.shape)
    return (_fresh(tuple(1 if at in summed else size for at, size in sizes if keepdim or at not in summed), x),)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    given = [each for each in (weight, bias) if each is not None]
    if not _is_normalised(x, shape, given):
        return None
    statistics = (*x.shape[: -len(shape)], *[1] * len(shape))
    return _fresh(tuple(x.shape), x), _fresh(statistics, x), _fresh(statistics, x)


def _layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Any:  # fmt: skip
    if weight is None or bias is None or not _is_normalised(x, shape, [weight, bias]):
        return None
    if not _is_dense(grad) or grad.shape != x.shape or grad.dtype != x.dtype or not all(mask):
        return None
    return _fresh(tuple(x.shape), x), _fresh(tuple(shape), x), _fresh(tuple(shape), x)


def _is_normalised(x: Any, shape: Sequence[int], given: Sequence[Any]) -> bool:
    """True for a layer norm over the last dims of what is dense."""
    if not shape or x.dtype not in _REAL or not _is_dense(x) or tuple(x.shape[-len(shape) :]) != tuple(shape):
        return False
    is_alike = all(each.dtype == x.dtype and each.fake_device == x.fake_device for each in given)
    return is_alike and all(_is_dense(each) and tuple(each.shape) == tuple(shape) for each in given)


_RULES: dict[Any, Infer] = {
    aten.view.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.new_empty.default: _new_empty,
    aten.empty_like.default: _empty_like,
    aten.expand.default: _expand,
    aten.sum.dim_IntList: _sum,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}


class Elementwise:
    """Ops that take each element by itself. Their dtype is torch's to tell, at the first call with operands of the same
    dtypes and numbers of the same kinds; then the shape alone is new."""

    def __init__(self) -> None:
        self._dtypes: dict[tuple[Any, ...], torch.dtype] = {}

    def infer(self, key: tuple[Any, ...] | None, operands: Sequence[Any]) -> tuple[TensorForm, ...] | None:
        """The form of the result; None if it is not known."""
        dtype = self._dtypes.get(key) if key is not None else None
        if dtype is None:
            return None
        shape = max((tuple(operand.shape) for operand in operands), key=len_and_size)
        return (TensorForm(shape, strides_of(shape), 0, dtype, operands[0].fake_device, None),)

    def learn(self, key: tuple[Any, ...] | None, operands: Sequence[Any], made: Sequence[TensorForm | None]) -> None:
        """What torch told."""
        if key is None or len(made) != 1 or made[0] is None:
            return
        shape = max((tuple(operand.shape) for operand in operands), key=len_and_size)
        if made[0] == TensorForm(shape, strides_of(shape), 0, made[0].dtype, operands[0].fake_device, None):
            self._dtypes[key] = made[0].dtype


def len_and_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """By which the largest of some shapes is found that are broadcast to it."""
    return len(shape), math.prod(shape)


def elementwise_key(func: Any, args: Sequence[Any], kwargs: Any, operands: Sequence[Any]) -> tuple[Any, ...] | None:
    """What decides the dtype of an op by elements; None for another op, or where its shape and strides are not plain to
    see: dense operands, of which one has the shape that the others are broadcast to."""
    if not _is_elementwise(func):
        return None
    shape = max((tuple(operand.shape) for operand in operands), key=len_and_size)
    device = operands[0].fake_device
    if not all(
        _is_dense(each) and each.fake_device == device and _is_broadcast(each.shape, shape) for each in operands
    ):
        return None
    parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            parts.append((value.dtype, not value.shape))
        elif value is None or type(value) in (int, float, bool):
            parts.append(type(value))
        elif isinstance(value, (str, torch.dtype)):
            parts.append(value)
        else:
            return None
    return tuple(parts)


def _is_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in pairs)


@lru_cache(1 << 12)
def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags
