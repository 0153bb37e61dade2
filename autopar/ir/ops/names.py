"""The names of ops, dtypes and formats in text, and the allow-list by which a name becomes an op again.

Reading a program runs no code from it: a name is looked up here, never imported or evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.errors import ArtifactError
from autopar.ir.ops.fused import Fused
from autopar.ir.ops.semantic import NAMESPACE

DTYPES: dict[str, torch.dtype] = {
    "b8": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip

_FORMATS = (
    torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
    torch.strided, torch.sparse_coo, torch.sparse_csr,
)  # fmt: skip
WORDS: dict[str, Any] = {
    "None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan"),
    **DTYPES, **{str(value): value for value in _FORMATS},
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PYTHON: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.mul": operator.mul,
}
_NAMESPACES = ("aten", NAMESPACE)
# aten ops that touch files or the terminal; no training step needs them
_REFUSED = frozenset({"from_file", "save", "warn", "_print"})
_NAME = re.compile(r"(\w+)\.(\w+)\.(\w+)\Z")
_PACKET = type(torch.ops.aten.add)
_OVERLOAD = type(torch.ops.aten.add.Tensor)
_PYTHON_NAMES = {function: name for name, function in PYTHON.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: f32, bf16, i64, b8."""
    return _DTYPE_NAMES[dtype]


def target_name(target: Any) -> str:
    """The name of an op in text, e.g. `aten.mul.Tensor`, `autopar.einsum.default`, `operator.getitem`."""
    if isinstance(target, _OVERLOAD):
        return str(target)
    if isinstance(target, Fused):
        return target.__name__
    return _PYTHON_NAMES.get(target) or f"{target.__module__}.{target.__qualname__}"


@cache
def find_target(name: str, custom_ops: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """The op of a name on the allow-list or in `custom_ops`; raises `ArtifactError` for every other name."""
    if name in PYTHON:
        return PYTHON[name]
    match = _NAME.match(name)
    if match and (name in custom_ops or (match[1] in _NAMESPACES and match[2] not in _REFUSED)):
        # getattr on torch.ops also finds Python's own attributes (`__class__`), hence the type checks
        packet = getattr(getattr(torch.ops, match[1]), match[2], None)
        if isinstance(packet, _PACKET) and match[3] in packet.overloads():
            overload = getattr(packet, match[3])
            if isinstance(overload, _OVERLOAD):
                return overload
    raise ArtifactError(
        f"'{name}' is not an op that a program may hold: these are the ops of aten and autopar, "
        f"{', '.join(sorted(PYTHON))}, and custom ops that have a rule in this process. If it is one of these, "
        f"import its module and call autopar.register_rule before loading."
    )
