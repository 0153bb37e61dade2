"""What a generated kernel computes: values, each an operation on others, with a shape and the dtype it is computed in.

The operations are few (see `Value`); the ops of a program are written in them by the tables of `rules_*.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.runtime.triton.lowering.index import IndexForm

Shape = tuple[int, ...]
Index = tuple[IndexForm, ...]
SHORT = frozenset((torch.float16, torch.bfloat16))


class CannotEmit(Exception):
    """A group for which no kernel can be written; the message says why. The group then runs op by op."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """An operation on values.

    op: "load" (data: number of the operand), "number" (data: number of an integer operand), "constant" (data: the
    number), "place" (data: a dim, of which it is the index), "point" (data: Triton's expression, with {0}, {1}, ... for
    the operands), "sum", "max", "min" (data: how many last dims; over these, which stay as dims of size 1), "column"
    (data likewise: over all dims but these), "view" (data: function from an index to that of the operand),
    "parts" (data: the dim, and where each operand begins on it; places of none of them are 0), "bits" (data: a `Draw`).
    dtype: what it is computed in: float32, float64, int64, int32 or bool. name: of the node that it stands for.
    """

    op: str
    args: tuple[Value, ...]
    shape: Shape
    dtype: torch.dtype
    data: Any = None
    name: str = field(default="", compare=False)

    def __add__(self, other: Operand) -> Value:
        return point("{0} + {1}", self, other)

    def __radd__(self, other: Operand) -> Value:
        return point("{0} + {1}", other, self)

    def __sub__(self, other: Operand) -> Value:
        return point("{0} - {1}", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return point("{0} - {1}", other, self)

    def __mul__(self, other: Operand) -> Value:
        return point("{0} * {1}", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return point("{0} * {1}", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return point("{0} / {1}", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return point("{0} / {1}", other, self)

    def __neg__(self) -> Value:
        return point("-{0}", self)


Operand = Value | float | int | bool


@dataclass(frozen=True, slots=True)
class Draw:
    """Random bits of an element, by its place in the whole: where the piece starts, plus the element's place along each
    dim of the piece times its stride in the whole.

    seed: the number of the operand. stream: None for the bits of dropout. Starts and strides are sums of numbers and of
    integer operands, which depend on the rank, times numbers.
    """

    seed: int
    key: int
    stream: int | None
    start: LinearForm
    strides: tuple[LinearForm, ...]
    wide: bool


@dataclass(frozen=True, slots=True)
class LinearForm:
    """const + the sum of operands (integers that the group is given) times factors."""

    const: int = 0
    terms: tuple[tuple[Value, int], ...] = ()

    @staticmethod
    def of(number: int | Value) -> LinearForm:
        return LinearForm(0, ((number, 1),)) if isinstance(number, Value) else LinearForm(number)

    def __add__(self, other: LinearForm | int) -> LinearForm:
        other = LinearForm(other) if isinstance(other, int) else other
        return LinearForm(self.const + other.const, (*self.terms, *other.terms))

    def __mul__(self, factor: int) -> LinearForm:
        return LinearForm(self.const * factor, tuple((operand, each * factor) for operand, each in self.terms))

    def text(self, cast: str = "") -> str:
        """In Python. cast: of the operands, before they are multiplied."""
        return " + ".join((*(f"in{operand.data}{cast} * {factor}" for operand, factor in self.terms), str(self.const)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are computed in."""
    if dtype in SHORT:
        return torch.float32
    if dtype.is_floating_point or dtype in (torch.bool, torch.int64):
        return dtype
    return torch.int32


def constant(value: float | int | bool, dtype: torch.dtype) -> Value:
    return Value("constant", (), (), dtype, bool(value) if dtype == torch.bool else value)


def point(expression: str, *operands: Operand, dtype: torch.dtype | None = None) -> Value:
    """An expression of Triton's, element by element; the operands broadcast. dtype: of the result, if not theirs."""
    own = next(o.dtype for o in operands if isinstance(o, Value))
    for operand in operands:
        if isinstance(operand, Value) and operand.dtype != own:
            own = torch.promote_types(own, operand.dtype)
    args = tuple(cast(o, own) if isinstance(o, Value) else constant(o, own) for o in operands)
    return Value("point", args, broadcast([a.shape for a in args]), dtype or own, expression)


def where(condition: Value, yes: Operand, no: Operand) -> Value:
    """yes where the condition holds, no elsewhere."""
    own = next(o.dtype for o in (yes, no) if isinstance(o, Value))
    if isinstance(yes, Value) and isinstance(no, Value):
        own = torch.promote_types(yes.dtype, no.dtype)
    args = (condition, *(cast(o, own) if isinstance(o, Value) else constant(o, own) for o in (yes, no)))
    return Value("point", args, broadcast([a.shape for a in args]), own, "tl.where({0}, {1}, {2})")


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The same numbers computed in another dtype; from floats to integers cut, as torch does."""
    if value.dtype == dtype:
        return value
    if value.op == "constant":
        return constant(value.data, dtype)
    text = "{0} != 0" if dtype == torch.bool else f"{{0}}.to({TYPES[dtype]})"
    return Value("point", (value,), value.shape, dtype, text)


def rounded(value: Value, dtype: torch.dtype) -> Value:
    """Rounded to a short dtype and wide again, as an op does that writes its result."""
    return Value("point", (value,), value.shape, value.dtype, f"{{0}}.to({TYPES[dtype]}).to({TYPES[value.dtype]})")


def reduced(op: str, value: Value, dims: int) -> Value:
    """A "sum", "max" or "min" over the last dims, which stay as dims of size 1."""
    return Value(op, (value,), (*value.shape[: len(value.shape) - dims], *[1] * dims), value.dtype, dims)


def summed_rows(value: Value, dims: int) -> Value:
    """The sum over all dims but the last ones."""
    return Value("column", (value,), value.shape[len(value.shape) - dims :], value.dtype, dims)


def view(value: Value, shape: Sequence[int], source: Callable[[Index], Index]) -> Value:
    return Value("view", (value,), tuple(shape), value.dtype, source)


def mean(value: Value, dims: int) -> Value:
    return reduced("sum", value, dims) / math.prod(value.shape[len(value.shape) - dims :])


def broadcast(shapes: Sequence[Shape]) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


TYPES = {
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
    torch.float64: "tl.float64", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16",
    torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip
