"""What stands for a Python number while a step is captured: an input of the program, that does as the number does.

It never promotes the dtype of a tensor that it meets, and only arithmetic may use it: `if beta > 0`, `math.exp(beta)`,
a size, an option of a torch function (`F.dropout(x, p=beta)`) and a text would need its value and are refused.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autopar.capture.python.arithmetic import DTYPES, Arithmetic, is_input, plain
from autopar.capture.python.number_tensors import Spelling, as_tensors, is_making
from autopar.capture.python.spans import CountSum, RowGroup, piece_between, sum_of
from autopar.capture.refusals.location import user_frame
from autopar.capture.trace.computed_views import PLACED, rows_between
from autopar.errors import CaptureError
from autopar.ir.ops.op_facts import numbers_of

Tensor = torch.Tensor


def is_number(value: Any) -> bool:
    """True for a Python number that could be an input of a program."""
    return type(value) in DTYPES


@dataclass(slots=True)
class Misuse:
    """How numbers were used that arithmetic alone may use; what stands for them does so while `is_open`."""

    is_open: bool = False
    is_drawn: bool = False  # random numbers alone decide them
    reasons: dict[Hashable, str] = field(default_factory=dict)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def error(self, how: str) -> CaptureError:
        """What is said of a number that is used so."""
        return CaptureError(f"a number {how}.")

    def read(self, tensor: Tensor, function: Callable[[Any], Any]) -> Any:
        """What Python is given of a number that a tensor holds; NotImplemented where no step may give it."""
        return NotImplemented

    def drawn(self, tensor: Tensor) -> Any:
        """The number of a step that Python computes with, of a tensor that random numbers alone decide; NotImplemented
        of another one."""
        return NotImplemented

    def watch(self, number: Scalar) -> None:
        """Be told of each number that is made."""


def stands_for_number(tensor: Tensor) -> bool:
    """True for the tensor of a stand-in, which holds another value in each step."""
    return hasattr(tensor, "is_autopar_number")


def mark_number(tensor: Tensor) -> Tensor:
    """The tensor, which stands for a number from now on."""
    tensor.is_autopar_number = True  # type: ignore[attr-defined]
    return tensor


_KEPT = "is kept from a capture"
_TOO_LARGE = "is an integer of more than 64 bits where it meets a tensor"
_DIVIDES = "is divided with a number, which Python refuses where it is zero"
_RAISES = "is in a power of numbers"


def _refusal(name: str, function: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """A method for what takes the value out of a number. function: how."""

    def method(self: Scalar, *_: Any) -> Any:
        value = self.read(self.tensor, function) if function is not None else NotImplemented
        return self.refuse(f"is used by Python itself ({name})") if value is NotImplemented else value

    return method


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A method that compares a number with a tensor; with another number Python would choose by it."""

    def method(self: Scalar, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _of_two(function, self, other)
        value = _compared(function, self, other)
        if value is NotImplemented and type(other) is Scalar and other._at is None:
            known = min((other, *[self] * (self._at is None)), key=lambda number: number._book[0].is_drawn)
            value = known.read(lambda: function(self.tensor(), other.tensor()), bool)  # of data, where one is
        elif value is NotImplemented and type(other) in DTYPES:
            value = self.read(lambda: function(self.tensor(), other), bool)
        return self.refuse(f"is compared ({function.__name__})") if value is NotImplemented else value

    return method


def _compared(function: Callable[[Any, Any], Any], one: Scalar, other: Any) -> Any:
    """Whether rows begin where they end, of which there are as many as a tensor says; NotImplemented for other numbers.
    They do not end before."""
    spans = [_span(number) for number in (one, other)]
    for (start, end), may_be in ((spans, operator.lt), (spans[::-1], operator.gt)):
        piece = piece_between(start, end)
        if piece is not None and function in (operator.eq, operator.ne, may_be, _NOT[may_be]):
            is_empty = function in (operator.eq, _NOT[may_be])
            return one.read(partial(_is_empty if is_empty else _has_rows, piece), bool)
    return NotImplemented


def _is_empty(piece: RowGroup) -> Tensor:
    return piece.count() == 0


def _has_rows(piece: RowGroup) -> Tensor:
    return piece.count() != 0


def _span(number: Any) -> Any:
    return number.span if type(number) is Scalar else number


_NOT = {operator.lt: operator.ge, operator.gt: operator.le}


class Scalar:
    """Stands for a Python number, or for one that was computed of such.

    value: the number now, where Python has it, as the result of the step `at` of its book's arithmetic. tensor: what
    stands for it in the graph; made where a tensor meets the number. span: of which counts it is the sum, and
    addends: the numbers of these counts."""

    __slots__ = ("__weakref__", "_addends", "_at", "_book", "_number", "_tensor", "_value", "span")
    __array_ufunc__ = None  # numpy leaves arithmetic to this class

    def __init__(self, book: tuple[Misuse, frozenset[Hashable]], tensor: Tensor | None = None, value: Any = None,
                 at: int | None = None, number: Any = None, span: CountSum | None = None,
                 addends: tuple[Scalar, ...] = ()) -> None:  # fmt: skip
        self._tensor, self._value, self._at, self._number, self._book = tensor, value, at, number, book
        self.span, self._addends = span, addends
        book[0].watch(self)
        if tensor is not None:
            mark_number(tensor)

    @staticmethod
    def of_place(place: Hashable, number: Any, misuse: Misuse) -> Scalar:
        """What stands for the number at a place."""
        return Scalar((misuse, frozenset((place,))), value=number, at=misuse.arithmetic.at(place), number=number)

    @staticmethod
    def of_tensor(tensor: Tensor, misuse: Misuse) -> Scalar:
        """What stands for a number that a tensor holds."""
        return Scalar((misuse, frozenset()), tensor)

    @staticmethod
    def original(value: Any) -> Any:
        """The object that stood where a value stands."""
        return value._number if type(value) is Scalar else value

    @property
    def __class__(self) -> Any:
        """What `isinstance` is told: C code, which would take a value out, looks at the real type."""
        if self._at is not None:
            return type(self._value)
        if self.span is not None:
            return int
        return float if self.tensor().dtype == torch.float64 else int

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError("a number has no other class")

    def tensor(self) -> Tensor:
        """What stands for the number in the graph: nothing of it is rounded."""
        if self._tensor is None:
            self._tensor = mark_number(self._sum() if self.span is not None else self._computed())
        return self._tensor

    def _sum(self) -> Tensor:
        """The sum of counts as they were when they were read: the tensor that held them may be written since."""
        first, *others = [addend.tensor() for addend in self._addends]
        return sum(others, first)

    def _computed(self) -> Tensor:
        if not is_input(self._value):
            self.refuse(_TOO_LARGE)
        return self._book[0].arithmetic.tensor(self._at or 0, self._value)

    def refuse(self, how: str) -> Any:
        """Raise CaptureError, and remember why, should the user's code catch it."""
        misuse, places = self._book
        frame = user_frame(sys._getframe(1))
        line = f" at {os.path.basename(frame[0])}:{frame[1]}" if frame else ""
        for place in places:
            misuse.reasons.setdefault(place, f"{how}{line}")
        raise misuse.error(f"{how}{line}")

    def read(self, made: Callable[[], Tensor], function: Callable[[Any], Any]) -> Any:
        """What Python is given of a tensor that is made of this number; NotImplemented if no tensor holds it."""
        is_held = self._at is None and self._book[0].is_open
        return self._book[0].read(made(), function) if is_held else NotImplemented

    def close(self) -> CaptureError:
        """Stand for nothing from now on: the run is over, and what is said of a number that somebody kept."""
        self._book[0].is_open = False
        return self._book[0].error("is kept from this step")

    def held(self) -> Any:
        """The tensor of a number that a tensor holds; another number itself."""
        return self if self._at is not None else self.tensor()

    def place(self) -> Any:
        """The tensor of an integer that a tensor holds, to look something up by; else the integer itself."""
        return operator.index(self) if self._at is not None or self.tensor().is_floating_point() else self.tensor()

    def drawn(self, how: str) -> Any:
        """The number of a step, of one that random numbers alone decide; another one is refused for `how`."""
        value = NotImplemented if self._at is not None else self._book[0].drawn(self.tensor())
        return self.refuse(how) if value is NotImplemented else value

    def drawn_integer(self, how: str) -> Any:
        """The integer of a step, which decides its program, of a drawn one; another number is refused for `how`."""
        return self.refuse(how) if self.tensor().is_floating_point() else self.drawn(how)

    def like(self, tensors: list[Tensor], is_same: bool) -> Tensor:
        """The tensor that promotes others as the number does. is_same: the function wants one dtype of all."""
        if not self._book[0].is_open:
            self.refuse(_KEPT)
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        for tensor in tensors:
            if tensor.ndim and tensor.dtype == dtype and dtype.is_floating_point and not is_same:
                return self.tensor()  # of no dimensions and at most of the same category: it promotes nothing
        is_float = self.tensor().dtype == torch.float64
        if not (dtype.is_floating_point or dtype.is_complex) and is_float:
            dtype = torch.get_default_dtype()
        elif dtype == torch.bool:
            dtype = torch.int64
        return self._as(dtype)

    def _as(self, dtype: torch.dtype) -> Tensor:
        return self.tensor() if self.tensor().dtype == dtype else self.tensor().to(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = with_tensors(func, args, kwargs or {})
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(0.0, name):
            self.refuse(f"is asked for its .{name}")
        raise AttributeError(f"'float' object has no attribute '{name}'")

    def __deepcopy__(self, memo: Any) -> Scalar:
        return self

    def __copy__(self) -> Scalar:
        return self

    def __neg__(self) -> Any:
        return _of_numbers(operator.neg, self)

    def __pos__(self) -> Scalar:
        return self

    def __abs__(self) -> Any:
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
        return _of_two(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _of_two(operator.truediv, other, self)

    def __pow__(self, other: Any) -> Any:
        return _of_two(operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        return _of_two(operator.pow, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _of_two(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _of_two(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _of_two(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _of_two(operator.mod, other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        return _of_numbers(round, self) if digits is None else _of_numbers(round, self, digits)

    def __trunc__(self) -> Any:
        return _of_numbers(math.trunc, self)

    def __floor__(self) -> Any:
        return _of_numbers(math.floor, self)

    def __ceil__(self) -> Any:
        return _of_numbers(math.ceil, self)

    __bool__, __int__, __index__ = map(_refusal, ("bool", "int", "index"), (bool, int, int))
    __float__ = _refusal("float", float)
    __eq__, __ne__ = map(_comparison, (operator.eq, operator.ne))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, (operator.lt, operator.le, operator.gt, operator.ge))
    __hash__, __str__, __repr__, __format__ = map(_refusal, ("hash", "str", "repr", "format"))
    __reduce_ex__ = _refusal("pickle")


def with_tensors(func: Any, args: Any, kwargs: Any) -> Spelling:
    """The call of a torch function with tensors for the stand-ins among its arguments."""
    if func in _INDEXED:
        value = tuple(map(_tensor, args[2:]))
        is_any = bool(value) and not getattr(value[0], "ndim", 0)  # what is put there fits any number of rows
        args = (args[0], _index(args[1], is_any), *value)
    elif func in PLACED:
        args = (*map(_place, args[:3]), *args[3:])  # but the length of narrow(), which is no place
        kwargs = {name: value if name == "length" else _place(value) for name, value in kwargs.items()}
    elif is_making(func) and _has_numbers((*args, *kwargs.values())):
        call = as_tensors(func, args, kwargs, _tensor)
        if call is not None:
            return call
    args, kwargs = tuple(_whole(func, arg) for arg in args), {name: _whole(func, arg) for name, arg in kwargs.items()}
    values = [*args, *kwargs.values()]
    if not _has_numbers(values):
        return func, args, kwargs
    name = getattr(func, "__name__", "a function")
    if len(args) > numbers_of(name) or any(type(v) is Scalar for k, v in kwargs.items() if k in _OPTIONS):
        how = f"is an argument of {name}()"
        made = [value.drawn_integer(how) if type(value) is Scalar else value for value in values]
    else:
        tensors = [value for value in values if isinstance(value, Tensor)]
        made = [v.like(tensors, name.strip("_") == "lerp") if type(v) is Scalar else v for v in values]
    return func, tuple(made[: len(args)]), dict(zip(kwargs, made[len(args) :], strict=True))


def _has_numbers(values: Iterable[Any]) -> bool:
    """True if there are stand-ins among values, or in a list of them."""
    return any(type(one) is Scalar or (type(one) in (tuple, list) and _has_numbers(one)) for one in values)


def _whole(func: Any, value: Any) -> Any:
    """An argument with the integers of a step for the stand-ins of drawn ones in a list of it: sizes, pads. Each is
    another program; what else stands there is refused."""
    if type(value) not in (tuple, list) or not any(type(item) is Scalar for item in value):
        return value
    how = f"is in an argument of {getattr(func, '__name__', 'a function')}()"
    made = (item.drawn_integer(how) if type(item) is Scalar else item for item in value)
    return type(value)(made)


_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


def _tensor(value: Any) -> Any:
    return value.tensor() if type(value) is Scalar else value


def _place(value: Any) -> Any:
    return value.place() if type(value) is Scalar else value


def _index(value: Any, is_any: bool) -> Any:
    """An index with tensors for the stand-ins in it, which are looked up; a slice whose length they decide has Python
    integers, unless it may have any length."""
    if type(value) is tuple:
        return tuple(_index(item, is_any) for item in value)
    if type(value) is Scalar:
        return value.place()
    if type(value) is not slice or not any(type(bound) is Scalar for bound in (value.start, value.stop, value.step)):
        return value
    start, stop = map(_place, (value.start, value.stop))
    if type(value.step) is not Scalar and (is_any or rows_between(start, stop) is not None):
        return slice(start, stop, value.step)
    start, stop, step = (
        operator.index(one) if type(one) is Scalar else one for one in (value.start, value.stop, value.step)
    )
    return slice(start, stop, step)


def _of_two(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Arithmetic of a stand-in with a tensor or another number."""
    if isinstance(left, Tensor):
        return function(left, right.like([left], False))
    if isinstance(right, Tensor):
        return function(left.like([right], False), right)
    is_number = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return _of_numbers(function, left, right) if is_number else NotImplemented


def _of_numbers(function: Callable[..., Any], *numbers: Any) -> Any:
    """A function of numbers alone, as Python computes it."""
    known = [number for number in numbers if type(number) is Scalar]
    if not known[0]._book[0].is_open:
        known[0].refuse(_KEPT)
    if any(number._at is None for number in known):
        return _of_tensors(function, *numbers)
    misuse, places = known[0]._book[0], frozenset(place for number in known for place in number._book[1])
    given = tuple(number._value if type(number) is Scalar else number for number in numbers)
    value = plain(function(*given))
    if type(value) not in DTYPES:
        known[0].refuse(f"gives a {type(value).__name__} in Python ({function.__name__})")
    at = misuse.arithmetic.call(function, given, tuple(n._at if type(n) is Scalar else None for n in numbers))
    return Scalar((misuse, places), value=value, at=at)


def _of_tensors(function: Callable[..., Any], *numbers: Any) -> Any:
    """A function of numbers of which a tensor holds one: it may not decide what Python does."""
    held = [number for number in numbers if type(number) is Scalar and number._at is None]
    known = min(held, key=lambda number: number._book[0].is_drawn)  # what data and random numbers decide, data do
    left, right = numbers[0], numbers[-1]
    span = sum_of(*(_span(number) for number in numbers)) if function is operator.add else None
    if span is not None:  # it may only say where rows begin: the sum is made when it is asked for
        return Scalar(
            known._book, span=span, addends=tuple(part for number in held for part in number._addends or (number,))
        )
    if function in _ROUNDED and len(numbers) == 1 and _rounds(left):
        is_whole = isinstance(left, int)
        return left if is_whole else Scalar(left._book, _ROUNDED[function](left.tensor()).to(torch.int64))
    is_remainder = function in _REMAINDERS
    if (function is operator.truediv or is_remainder) and not _divides(function, left, right):
        return _of_drawn(_DIVIDES, function, *numbers)
    if function is operator.pow and not _raises(left, right):
        return _of_drawn(_RAISES, function, *numbers)
    if function not in _OF_TENSORS and not is_remainder:
        return _of_drawn(f"is used by Python itself ({function.__name__})", function, *numbers)
    is_float = function is operator.truediv or any(isinstance(number, float) for number in numbers)
    is_float |= function is operator.pow and type(right) is int and right < 0
    dtype = torch.float64 if is_float else torch.int64
    tensors = [number._as(dtype) if type(number) is Scalar else number for number in numbers]
    if is_remainder and type(right) is Scalar:  # kernels of integers end the step that is to say that it is zero
        tensors[-1] = torch.where(tensors[-1] == 0, 1, tensors[-1])
    places = frozenset(place for number in numbers if type(number) is Scalar for place in number._book[1])
    return Scalar((known._book[0], places), _REMAINDERS.get(function, function)(*tensors))


def _divides(function: Callable[..., Any], left: Any, right: Any) -> bool:
    """Whether a program can divide by a number: one that is not zero, which each step looks at where a tensor holds it.
    Raises ZeroDivisionError as Python does where it is zero in this step."""
    if type(right) is not Scalar:
        return type(right) in DTYPES and right != 0
    if right._book[0].is_drawn:
        return False
    is_zero = right.read(lambda: right.tensor() == 0, bool)
    if is_zero is True:
        function(1.0 if isinstance(left, float) else 1, 0.0 if isinstance(right, float) else 0)
    return is_zero is False


def _rounds(number: Scalar) -> bool:
    """Whether a program can round a number to an integer of 64 bits, which each step looks at."""
    return isinstance(number, int) or _holds(number, lambda value: abs(value) < 1 << 63)


def _raises(base: Any, exponent: Any) -> bool:
    """Whether a program can raise a number to a power: to one that is a number of the same type in every step, which
    each step looks at. Raises ZeroDivisionError as Python does where zero has no such power in this step."""
    is_known = type(exponent) in DTYPES
    if is_known and exponent < 0 and not _divides(lambda _, zero: zero**exponent, 1, base):
        return False
    if is_known and float(exponent).is_integer():
        return True
    if isinstance(base, int) and isinstance(exponent, int):
        return _holds(exponent, lambda value: value >= 0)  # an integer; a float otherwise
    least = operator.ge if is_known else operator.gt
    return _holds(base, lambda value: least(value, 0))  # of negative numbers it is complex


def _holds(number: Any, test: Callable[[Any], Any]) -> bool:
    """Whether a test is true of a number: of one that a tensor holds, in this step and in all others."""
    if type(number) is not Scalar:
        return bool(test(number))
    return not number._book[0].is_drawn and number.read(lambda: test(number.tensor()), bool) is True


def _of_drawn(how: str, function: Callable[..., Any], *numbers: Any) -> Any:
    """What Python computes of drawn numbers, which it has in each step; other numbers are refused for `how`."""
    given = [number.drawn(how) if type(number) is Scalar else number for number in numbers]
    return function(*given)


_OF_TENSORS = (operator.neg, operator.abs, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
_ROUNDED: dict[Any, Callable[..., Any]] = {
    round: torch.round, math.trunc: torch.trunc, math.floor: torch.floor, math.ceil: torch.ceil,
}  # fmt: skip
_REMAINDERS: dict[Any, Callable[..., Any]] = {operator.mod: torch.remainder, operator.floordiv: torch.floor_divide}


_OPTIONS = ("alpha", "rounding_mode", "out")
