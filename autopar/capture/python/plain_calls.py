"""Tell the calls of torch functions that run none of the user's code, whatever torch does inside of them.

Most of what Python does in a run on shapes is torch's own machinery. Where it can come to no function of the user's,
nobody needs to look (see `Ran.unwatched`), and the run takes a third of the time.
"""

from __future__ import annotations

from functools import cache
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from autopar.torch_compat import FakeTensor, OpOverload, dispatch_modes, packs_saved_tensors

_NAMESPACES = ("aten", "prims", "prim", "autopar")  # those of other ops may be written in Python
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)  # a subclass of the user's has functions of its own
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
# Others may have methods that torch calls (`__index__`), or be functions.
_VALUES = frozenset(
    (int, float, complex, bool, str, bytes, NoneType, EllipsisType, torch.Size, torch.dtype, torch.device,
     torch.layout, torch.memory_format, torch.Generator, *_TENSORS)
)  # fmt: skip


def is_plain_call(func: Any, types: Any, args: Any, kwargs: Any, modes: int) -> bool:
    """True for a call of torch's own function on plain values, with nothing of the user's between it and its ops.

    modes: the number of dispatch modes on the stack that are not the user's.
    """
    return (
        _is_torchs(func)
        and all(kind in _TENSORS for kind in types)
        and _is_plain(args)
        and (not kwargs or _is_plain(tuple(kwargs.values())))
        and dispatch_modes() <= modes
        and not packs_saved_tensors()
    )


@cache
def _is_torchs(func: Any) -> bool:
    if isinstance(func, OpOverload):
        return func.namespace in _NAMESPACES
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, _BUILT_IN)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _VALUES:
        return True
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    return kind is slice and _is_plain((value.start, value.stop, value.step))
