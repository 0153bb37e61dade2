"""A model and its batch in the dtype that they are compared in, complex tensors in its complex one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Inlined, check_plain, variables


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A floating-point or complex tensor in `dtype`; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_complex():
        return leaf.to(dtype.to_complex())
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def module_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself, its parameters and buffers in `dtype`."""
    change = partial(cast, dtype=dtype)
    for module in tables.modules(model):  # `model.to` makes complex tensors real, and may be a method of the user's own
        if type(module)._apply.__module__.startswith("torch."):
            module._apply(change, recurse=False)
        else:  # which may move what is in no table, and goes to its children itself
            module._apply(change)
    return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that a model computes in, of its first parameter; of a complex one that of its parts."""
    dtype = next(tables.parameters(model)).dtype
    return dtype.to_real() if dtype.is_complex else dtype


@contextmanager
def in_dtype(model: nn.Module, loss_fn: Callable[..., Any] | None, dtype: torch.dtype) -> Iterator[None]:
    """Hold the modules that a loss function knows beside the model in a dtype while the context lasts."""
    own = {id(tensor) for _, tensor in state_of(model).entries}
    known = {id(value): value for _, value in variables(loss_fn) if isinstance(value, nn.Module)}
    saved = []
    for module in known.values():
        if isinstance(module, Inlined):
            check_plain(module)
        for _, tensor in state_of(module).entries:
            if id(tensor) not in own and (tensor.is_floating_point() or tensor.is_complex()):
                saved.append((tensor, tensor.data))
                tensor.data = cast(tensor.data, dtype)
    try:
        yield
    finally:
        for tensor, data in reversed(saved):
            tensor.data = data
