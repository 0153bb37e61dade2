"""Find the functions of torch, numpy and Python's own library that a step calls: others may be put in their place."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Set
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.python.library_state import codes_of, names_reached

# What every call of a module, and every operator on tensors, goes through.
MACHINES = (nn.Module, torch.Tensor)
# Functions without arguments that tell how torch or Python are set.
STATES = {
    function.__name__: function
    for function in (
        torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
        torch.get_deterministic_debug_mode, torch.get_float32_matmul_precision, torch.get_num_threads,
        torch.get_num_interop_threads, torch.is_warn_always_enabled, torch.get_default_device, sys.getrecursionlimit,
        os.getcwd, torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled, torch.is_autocast_cache_enabled,
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled,
    )
}  # fmt: skip
_SETTINGS = ("torch.backends", "torch.utils.deterministic")  # modules whose classes hold some
# Functions of C, which are told by their names.
MEMBERS = (MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType,
           ClassMethodDescriptorType, np.ufunc)  # fmt: skip


@functools.lru_cache(256)
def functions_called(module: ModuleType, names: frozenset[str]) -> tuple[str, ...]:
    """The names of a module's functions and classes that code of these names calls, and that those call there."""
    values, found, pending = vars(module), dict[str, None](), sorted(names & vars(module).keys())
    while pending:
        name = pending.pop()
        if name not in found and callable(values[name]) and not isinstance(values[name], ModuleType):
            found[name] = None
            pending += [inner for code in codes_of(values[name]) for inner in code.co_names if inner in values]
    return tuple(found)


@functools.cache
def names_of_layer(kind: type) -> frozenset[str]:
    """The names in the code of a layer of torch."""
    return names_reached(kind, ["forward"])


def is_told(value: Any) -> bool:
    """True for what a library defines and another process can be asked for."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, ModuleType))
    return isinstance(value, (FunctionType, type, property, classmethod, staticmethod, *MEMBERS))


def settings_of(module: ModuleType, names: Set[str]) -> Iterator[tuple[Any, str]]:
    """The settings of torch with these names, as `torch.backends.cudnn.benchmark`: what holds each, and its name."""
    values = vars(module)
    held = [values[name] for name in sorted(names & values.keys())]
    for holder in (module, *held):
        kind = type(holder)
        if kind is not ModuleType and kind.__module__.startswith(_SETTINGS):
            found = ((name, _setting(holder, name)) for name in sorted(names))
            yield from ((holder, name) for name, value in found if isinstance(value, (bool, int, str)))


def _setting(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except RuntimeError:  # torch has an old and a new way to ask for a precision, and tells none where both were used
        return None
