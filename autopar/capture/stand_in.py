"""What stands for a Python number while a step is captured: an input of the program, that does as the number does.

It never promotes the dtype of a tensor that it meets, and only arithmetic may use it: `if beta > 0`, `math.exp(beta)`,
a size, an option of a torch function (`F.dropout(x, p=beta)`) and a text would need its value and are refused.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.location import user_frame
from autopar.errors import CaptureError

Tensor = torch.Tensor
DTYPES = {float: torch.float64, int: torch.int64}


def is_number(value: Any) -> bool:
    """True for a Python number that could be an input of a program."""
    return type(value) in DTYPES


@dataclass(slots=True)
class Misuse:
    """How numbers were used that arithmetic alone may use; what stands for them does so while `is_open`."""

    is_open: bool = False
    reasons: dict[Hashable, str] = field(default_factory=dict)

    def error(self, how: str) -> CaptureError:
        """What is said of a number that is used so."""
        return CaptureError(f"a number {how}.")

    def watch(self, number: Scalar) -> None:
        """Be told of each number that is made."""


def stands_for_number(tensor: Tensor) -> bool:
    """True for the tensor of a stand-in, which holds another value in each step."""
    return hasattr(tensor, "is_autopar_number")


_KEPT = "is kept from a capture"
_DIVIDES = "is divided with a number, which Python refuses where it is zero"
_RAISES = "is in a power of numbers"


def _refusal(name: str) -> Callable[..., Any]:
    """A method for what takes the value out of a number."""

    def method(self: Scalar, *_: Any) -> Any:
        self.refuse(f"is used by Python itself ({name})")

    return method


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A method that compares a number with a tensor; with another number Python would choose by it."""

    def method(self: Scalar, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _of_two(function, self, other)
        return self.refuse(f"is compared ({function.__name__})")

    return method


class Scalar:
    """Stands for a Python number, or for one that was computed of such."""

    __slots__ = ("__weakref__", "_book", "_number", "_tensor")
    __array_ufunc__ = None  # numpy leaves arithmetic to this class

    def __init__(self, tensor: Tensor, number: Any, book: tuple[Misuse, frozenset[Hashable]]) -> None:
        self._tensor, self._number, self._book = tensor, number, book
        book[0].watch(self)
        tensor.is_autopar_number = True  # type: ignore[attr-defined]

    @staticmethod
    def original(value: Any) -> Any:
        """The object that stood where a value stands."""
        return value._number if type(value) is Scalar else value

    @property
    def __class__(self) -> Any:
        """What `isinstance` is told: C code, which would take a value out, looks at the real type."""
        return float if self._tensor.dtype == torch.float64 else int

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError("a number has no other class")

    def refuse(self, how: str) -> Any:
        """Raise CaptureError, and remember why, should the user's code catch it."""
        misuse, places = self._book
        frame = user_frame(sys._getframe(1))
        line = f" at {os.path.basename(frame[0])}:{frame[1]}" if frame else ""
        for place in places:
            misuse.reasons.setdefault(place, f"{how}{line}")
        raise misuse.error(f"{how}{line}")

    def like(self, tensors: list[Tensor], is_same: bool) -> Tensor:
        """The tensor that promotes others as the number does. is_same: the function wants one dtype of all."""
        if not self._book[0].is_open:
            self.refuse(_KEPT)
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        for tensor in tensors:
            if tensor.ndim and tensor.dtype == dtype and dtype.is_floating_point and not is_same:
                return self._tensor  # of no dimensions and at most of the same category: it promotes nothing
        is_float = self._tensor.dtype == torch.float64
        if not (dtype.is_floating_point or dtype.is_complex) and is_float:
            dtype = torch.get_default_dtype()
        elif dtype == torch.bool:
            dtype = torch.int64
        return self._as(dtype)

    def _as(self, dtype: torch.dtype) -> Tensor:
        return self._tensor if self._tensor.dtype == dtype else self._tensor.to(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = with_tensors(func, args, kwargs or {})
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(0.0, name):
            self.refuse(f"is asked for its .{name}")
        raise AttributeError(f"'float' object has no attribute '{name}'")

    def __deepcopy__(self, memo: Any) -> Scalar:
        return self

    def __copy__(self) -> Scalar:
        return self

    def __neg__(self) -> Scalar:
        return _of_numbers(operator.neg, self)

    def __pos__(self) -> Scalar:
        return self

    def __abs__(self) -> Scalar:
        return _of_numbers(operator.abs, self)

    def __add__(self, other: Any) -> Any:
        return _of_two(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _of_two(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _of_two(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _of_two(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _of_two(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _of_two(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        if type(other) in DTYPES and other != 0:
            return _of_numbers(operator.truediv, self, other, is_float=True)
        return _of_two(operator.truediv, self, other) if isinstance(other, Tensor) else self.refuse(_DIVIDES)

    def __rtruediv__(self, other: Any) -> Any:
        return _of_two(operator.truediv, other, self) if isinstance(other, Tensor) else self.refuse(_DIVIDES)

    def __pow__(self, other: Any) -> Any:
        if type(other) is int and other >= 0:
            return _of_numbers(operator.pow, self, other)
        return _of_two(operator.pow, self, other) if isinstance(other, Tensor) else self.refuse(_RAISES)

    def __rpow__(self, other: Any) -> Any:
        if type(other) is float and other > 0:
            return _of_numbers(operator.pow, other, self, is_float=True)
        return _of_two(operator.pow, other, self) if isinstance(other, Tensor) else self.refuse(_RAISES)

    __bool__, __float__, __int__, __index__ = map(_refusal, ("bool", "float", "int", "index"))
    __eq__, __ne__ = map(_comparison, (operator.eq, operator.ne))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, (operator.lt, operator.le, operator.gt, operator.ge))
    __hash__, __str__, __repr__, __format__ = map(_refusal, ("hash", "str", "repr", "format"))
    __round__, __trunc__, __floor__, __ceil__ = map(_refusal, ("round", "trunc", "floor", "ceil"))
    __mod__, __rmod__, __floordiv__, __rfloordiv__ = map(_refusal, ("%", "%", "//", "//"))
    __divmod__, __rdivmod__, __reduce_ex__ = map(_refusal, ("divmod", "divmod", "pickle"))


def with_tensors(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a torch function with tensors for the stand-ins among them."""
    values = [*args, *kwargs.values()]
    for inside in (item for value in values if type(value) in (tuple, list) for item in value):
        if type(inside) is Scalar:
            inside.refuse(f"is in an argument of {getattr(func, '__name__', 'a function')}()")
    found = [value for value in values if type(value) is Scalar]
    if not found:
        return args, kwargs
    if len(args) > _OPERANDS.get(func, 0) or any(type(v) is Scalar for k, v in kwargs.items() if k in _OPTIONS):
        found[0].refuse(f"is an argument of {getattr(func, '__name__', 'a function')}()")
    tensors = [value for value in values if isinstance(value, Tensor)]
    made = [v.like(tensors, func in _OF_ONE_DTYPE) if type(v) is Scalar else v for v in values]
    return tuple(made[: len(args)]), dict(zip(kwargs, made[len(args) :], strict=True))


def _of_two(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Arithmetic of a stand-in with a tensor or another number."""
    if isinstance(left, Tensor):
        return function(left, right.like([left], False))
    if isinstance(right, Tensor):
        return function(left.like([right], False), right)
    is_number = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return _of_numbers(function, left, right) if is_number else NotImplemented


def _of_numbers(function: Callable[..., Tensor], *numbers: Any, is_float: bool = False) -> Scalar:
    """A function of numbers alone, as Python computes it."""
    known = [number for number in numbers if type(number) is Scalar]
    if not known[0]._book[0].is_open:
        known[0].refuse(_KEPT)
    is_float = is_float or any(isinstance(number, float) for number in numbers)
    dtype = torch.float64 if is_float else torch.int64
    tensors = [number._as(dtype) if type(number) is Scalar else number for number in numbers]
    places = frozenset(place for number in known for place in number._book[1])
    return Scalar(function(*tensors), None, (known[0]._book[0], places))


def _spelled(*names: str) -> frozenset[Any]:
    """A torch function by all its names."""
    spellings = [form for name in names for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")]
    return frozenset(getattr(owner, form) for owner in (torch, Tensor) for form in spellings if hasattr(owner, form))


_OPTIONS = ("alpha", "rounding_mode", "out")
_OF_ONE_DTYPE = _spelled("lerp")
_OPERANDS = {  # by function: how many of its arguments may be numbers or tensors
    **dict.fromkeys(_spelled("lerp", "where", "masked_fill", "clamp", "clip"), 3),
    **dict.fromkeys(_spelled(
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "pow", "clamp_min",
        "clamp_max", "gt", "ge", "lt", "le", "eq", "ne",
    ), 2),
}  # fmt: skip
