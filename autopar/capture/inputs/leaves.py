"""The leaves of a call's arguments: tensors, and Python values that decide the program. All else is refused by name."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.inputs.arrays import BatchArray
from autopar.errors import BatchError, CaptureError
from autopar.torch_compat import FakeTensor

_EXACT = (int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_AS_TEXT = (Decimal, Fraction, date, time, timedelta, PurePath, UUID)  # immutable, and their text says all
_PRINTED = {*_EXACT, bool, float, complex, range, bytearray}  # whose own text says all, and is alike everywhere
_BY_IDENTITY = (Enum, FunctionType, type, ModuleType, nn.Module, torch.Generator)
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_WITHHELD = ("tokenizers",)  # packages whose objects ride on a batch (BatchEncoding's), and that no model reads
_DEPTH = 4  # of containers in containers that a text looks into
_KINDS = "biufc"  # of numpy arrays that have a dtype of torch's


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A value that is equal to itself alone. Held, so that its id stays its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _refuse(held: Withheld, *_: Any, **__: Any) -> Any:
    what = object.__getattribute__(held, "_what")
    raise CaptureError(f"{what}, which no compiled step carries: use tensors, numbers, text and containers of them.")


class Withheld:
    """Stands where a step cannot carry what stood there. To look at it is an error."""

    def __init__(self, path: str, kind: str) -> None:
        object.__setattr__(self, "_what", f"{path} is a {kind}")

    __call__ = __iter__ = __next__ = __getitem__ = _refuse

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return _refuse(self)


def withheld(value: Any, path: str) -> Any:
    """The value, or what stands for it where no step carries it and nobody should mind."""
    kind = type(value)
    return Withheld(path, kind.__name__) if kind.__module__.split(".")[0] in _WITHHELD else value


def key_of(value: Any) -> Hashable | None:
    """What two Python values have in common if a program may take one for the other: type and value.

    1, 1.0 and True differ, as do 0.0 and -0.0; nan is itself. None for what is no such value.
    """
    kind = type(value)
    if kind is Withheld:
        return (kind,)
    if kind is object or isinstance(value, _BY_IDENTITY):
        return Same(value)
    if isinstance(value, (int, float, complex, str, bytes)) and getattr(value, "__dict__", None):
        return None  # of a class of the user's, with more in it
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes() if value == value else "nan"
    if isinstance(value, (int, float)) and not issubclass(kind, (int, float)):
        return Same(value)  # stands for a number while a step is captured
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, _EXACT):
        return kind, value
    if isinstance(value, _AS_TEXT):
        return kind, str(value)
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, range):
        return kind, value.start, value.stop, value.step
    if isinstance(value, re.Pattern):
        return kind, value.pattern, value.flags
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        owner = value.__self__
        key = key_of(owner) if owner is not None else kind
        return None if key is None else (kind, value.__name__, key)
    if isinstance(value, (frozenset, set)):
        keys = [key_of(item) for item in value]
        return None if None in keys else (kind, frozenset(keys))
    if isinstance(value, tuple):  # a key of a dict, or in a set
        keys = [key_of(item) for item in value]
        return None if None in keys else (kind, tuple(keys))
    if callable(value) and (kind.__module__.startswith("torch") or not hasattr(value, "__dict__")):
        return Same(value)
    return None


def text_of(value: Any, depth: int = _DEPTH) -> str:
    """A Python value as it prints, with nothing in it that differs between ranks: no address, no order of a set.

    Of what is known by identity it is the name, of an object the class: a `__repr__` of the user's may say anything.
    """
    kind = type(value)
    if kind in _PRINTED or (isinstance(value, np.generic) and value.dtype.kind in _KINDS):
        return repr(value)
    if isinstance(value, Enum):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, _AS_TEXT):
        return f"{kind.__name__}({str(value)!r})"
    for base in (bool, int, float, complex, str, bytes):
        if isinstance(value, base):  # of a class of the user's
            return f"{kind.__name__}({base.__repr__(value)})"
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, (tuple, list, set, frozenset, dict)) and depth > 0:
        return _text_of_container(value, depth - 1)
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (MethodType, BuiltinFunctionType)) and value.__self__ is not None:
        return f"{kind.__name__} {value.__name__} of {text_of(value.__self__, 0)}"
    names = (getattr(value, name, None) for name in ("__qualname__", "__name__"))
    return " ".join((kind.__name__, *(name for name in [next(filter(None, names), None)] if isinstance(name, str))))


def _text_of_container(value: Any, depth: int) -> str:
    kind = type(value)
    if isinstance(value, (set, frozenset)):
        return f"{kind.__name__} of {', '.join(sorted(text_of(item, depth) for item in value))}"
    if isinstance(value, dict):
        text = ", ".join(f"{text_of(key, depth)}: {text_of(item, depth)}" for key, item in value.items())
        return f"{{{text}}}" if kind is dict else f"{kind.__name__}({{{text}}})"
    text = ", ".join(text_of(item, depth) for item in value)
    if kind is list:
        return f"[{text}]"
    text += "," * (kind is tuple and len(value) == 1)
    return f"({text})" if kind is tuple else f"{kind.__name__}({text})"


def tensor_of(value: Any, path: str) -> torch.Tensor | None:
    """A tensor as it is and a numpy array as a tensor on the same memory; None for what is neither.

    Raises BatchError for tensors and arrays that no step can take.
    """
    if isinstance(value, torch.Tensor):
        fault = next(_tensor_faults(value), None)
        if fault is not None:
            raise BatchError(f"{path} is {fault}.")
        return value
    if isinstance(value, BatchArray):
        return value.tensor
    if not isinstance(value, np.ndarray):
        return None
    if type(value) not in (np.ndarray, np.memmap) or value.dtype.kind not in _KINDS:
        kind = "" if type(value) is np.ndarray else f" of class {type(value).__name__}"
        raise BatchError(
            f"{path} is a numpy array{kind} of {value.dtype}, which is no tensor: a step takes plain arrays of "
            f"integers, floats or bools. Convert it, or leave it out of the batch."
        )
    try:
        array = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:
        raise BatchError(
            f"{path} is a numpy array of {value.dtype}, which torch does not have. Convert it, e.g. to float32."
        ) from None


def _tensor_faults(tensor: torch.Tensor) -> Iterator[str]:
    if isinstance(tensor, DTensor):
        yield "a DTensor, but every rank is given plain tensors: pass .full_tensor(), or the local part with " + (
            'batch="local"'
        )
    if tensor.is_nested:
        yield "a nested tensor: pad it to one length with .to_padded_tensor(0.0) and pass a mask"
    if tensor.layout != torch.strided:
        yield f"a sparse tensor ({tensor.layout}): pass .to_dense()"
    if tensor.is_quantized:
        yield "a quantized tensor: pass .dequantize()"
    if type(tensor) not in _TENSORS:
        yield f"a {type(tensor).__name__}, a class of tensors of its own: pass .as_subclass(torch.Tensor)"


def attributes_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    """What a user put on a tensor (`x.mask = mask`), without what torch keeps there."""
    held = vars(tensor)
    if not held or isinstance(tensor, FakeTensor):
        return {}
    return {name: value for name, value in held.items() if not name.startswith("_dynamo")}


def without_data(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor on the meta device that is like another one, with what that carries. shape: if it has another one."""
    meta = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    if shape is not None:
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
    return alike(meta, tensor, lambda value: value)


def alike(made: torch.Tensor, tensor: torch.Tensor, function: Callable[[Any], Any]) -> torch.Tensor:
    """Make a copy of a tensor a parameter if that is one, and give it its attributes. function: of each of these."""
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made.detach(), requires_grad=made.requires_grad)
    carried = attributes_of(tensor)
    if carried and made is not tensor:
        vars(made).update({name: function(value) for name, value in carried.items()})
    return made


def refused(value: Any, path: str) -> BatchError:
    """What is said of a value that is no leaf, and that cannot be taken apart."""
    kind = type(value).__name__
    if isinstance(value, (set, frozenset)):
        why = "with more in it than plain values, in no order: make it a list"
    elif isinstance(value, io.IOBase):
        why = "a file: read it before the step, and pass what it holds"
    elif hasattr(value, "__next__"):
        why = "which can be run through once only: make it a list"
    else:
        why = (
            "of which autopar cannot tell what it holds. Pass tensors, arrays, numbers and text, in lists, dicts, "
            "dataclasses or objects with plain attributes, and leave out what the model does not read"
        )
    return BatchError(f"{path} is a {kind}, {why}.")
