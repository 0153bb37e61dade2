"""Functions that take each row of those by itself that a mask selects (see `selected.py`): what they give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autopar.capture.functions import ExpertMM
from autopar.capture.location import Line

Tensor = torch.Tensor
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor along `dim`, of which those count where `valid` [n] is True; selected at a line."""

    tensor: Tensor  # held, so that its id stays its own
    valid: Tensor
    dim: int
    line: Line | None
    origin: Any  # the function that selected them
    shape: tuple[int, ...] = ()  # of the mask
    place: int | None = None  # of the places themselves, their dim of the mask
    may_specialize: bool = False  # the mask hangs on what a step leaves as it is


class Refused(Exception):
    """A function sees how many rows there are, or takes them together."""


class Known(Protocol):
    """What the rules ask of the rows that are known."""

    def row_of(self, value: Any) -> Rows | None:
        """What a tensor is, if it is such rows."""

    def is_all(self, base: Tensor, items: list[Any]) -> bool:
        """True if an index takes all places of one mask."""

    def at_places(self, base: Tensor, items: list[Any]) -> Tensor:
        """base[items] for all places of a mask."""


Made = tuple[Any, int]


def _indexed(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """x[.., places, ..] of another tensor; or slices of the rows, none of them along their dim."""
    base, key = args
    items = list(key) if isinstance(key, tuple) else [key]
    mine = self.row_of(base)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (base.ndim - taken)
    if mine is not None:
        return run(function, *args), _sliced(items, mine.dim)
    advanced = [i for i, item in enumerate(items) if isinstance(item, (Tensor, int))]
    if any(isinstance(items[i], Tensor) and self.row_of(items[i]) is None for i in advanced):
        raise Refused
    if any(isinstance(items[i], bool) for i in advanced) or advanced[-1] - advanced[0] + 1 != len(advanced):
        raise Refused
    if self.is_all(base, items):
        return self.at_places(base, items), advanced[0]
    return run(function, *args), advanced[0]


def _sliced(items: list[Any], dim: int) -> int:
    """Where a dim is after an index of None, numbers and slices."""
    source = result = 0
    for item in items:
        if item is None:
            result += 1
            continue
        if not isinstance(item, (slice, int)) or isinstance(item, bool):
            raise Refused
        if source == dim:
            if item != slice(None):
                raise Refused
            return result
        source += 1
        result += isinstance(item, slice)
    return result + dim - source


def _picked(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """index_select of another tensor."""
    if self.row_of(args[0]) is not None or len(args) != 3 or kwargs:
        raise Refused
    dim = args[1] % max(args[0].ndim, 1)
    items = [*[slice(None)] * dim, args[2]]
    return (self.at_places(args[0], items) if self.is_all(args[0], items) else run(function, *args)), dim


def _linear(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """A product with one matrix: only of the rows that count."""
    input_, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    mine = self.row_of(input_)
    if mine is None or len(rows) > 1 or not mine.dim < input_.ndim - 1 or weight.ndim != 2:
        raise Refused
    return _product(mine, input_, weight.t(), bias), mine.dim


def _matmul(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    left, right = args
    mine = self.row_of(left)
    if mine is None or len(rows) > 1 or right.ndim != 2 or not mine.dim < left.ndim - 1:
        raise Refused
    return _product(mine, left, right, None), mine.dim


def _product(rows: Rows, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if (
        x.shape[rows.dim] != math.prod(x.shape[:-1])
        or not x.is_floating_point()
        or torch.is_autocast_enabled(x.device.type)
    ):
        y = x @ matrix
    else:
        other = torch.where(rows.valid, 0, 1)  # there is one matrix; the padding has none
        made = ExpertMM.apply(x.reshape(-1, x.shape[-1]), matrix.unsqueeze(0), other)
        y = made.reshape(*x.shape[:-1], matrix.shape[1])
    return y if bias is None else y + bias


def _reshaped(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """The rows' dim is found again where as many elements stand before it."""
    mine = self.row_of(args[0])
    if mine is None:
        raise Refused
    result = run(function, *args, **kwargs)
    before, count = math.prod(mine.tensor.shape[: mine.dim]), mine.tensor.shape[mine.dim]
    for dim, size in enumerate(result.shape):
        if size == count and math.prod(result.shape[:dim]) == before:
            return result, dim
    raise Refused


def _along(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """Parts or a softmax along another dim."""
    mine, position = self.row_of(args[0]), 2 if function.__name__ in ("chunk", "split") else 1
    dim = kwargs["dim"] if "dim" in kwargs else args[position] if len(args) > position else None
    if mine is None or len(rows) > 1 or not isinstance(dim, int) or dim % mine.tensor.ndim == mine.dim:
        raise Refused
    return run(function, *args, **kwargs), mine.dim


def _reduced(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """A sum or mean over other dims, which are named."""
    mine = self.row_of(args[0])
    dims = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if mine is None or len(rows) > 1 or not isinstance(dims, (tuple, list)) or not dims:
        raise Refused
    gone = {dim % mine.tensor.ndim for dim in dims}
    if any(isinstance(dim, bool) for dim in dims) or mine.dim in gone:
        raise Refused
    result = run(function, *args, **kwargs)
    return result, mine.dim if result.ndim == mine.tensor.ndim else mine.dim - sum(dim < mine.dim for dim in gone)


def _normed(self: Known, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """Over the last dims."""
    mine = self.row_of(args[0])
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if mine is None or len(rows) > 1 or not mine.dim < mine.tensor.ndim - len(shape):
        raise Refused
    return run(function, *args, **kwargs), mine.dim


def pointwise(
    self: Known, name: str, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any
) -> tuple[Any, int]:
    """Element by element: all rows stand at one place from the right, where others have size 1."""
    if name not in _POINTWISE:
        raise Refused
    back = rows[0].tensor.ndim - rows[0].dim
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    mine = {id(one.tensor) for one in rows}
    if any(one.tensor.ndim - one.dim != back for one in rows):
        raise Refused
    if any(id(other) not in mine and other.ndim >= back and other.shape[-back] != 1 for other in tensors):
        raise Refused
    if name in _PARTIAL:
        args = [_inside(self, arg) if name not in _DIVISIONS or i else arg for i, arg in enumerate(args)]
    result = run(function, *args, **kwargs)
    return result, result.ndim - back


def _inside(self: Known, value: Any) -> Any:
    """Ones in the padding: there the function may have no value, or none that is finite, and its gradient neither."""
    mine = self.row_of(value)
    if mine is None:
        return value
    return torch.where(mine.valid.reshape(-1, *(1 for _ in value.shape[mine.dim + 1 :])), value, 1)


KEPT = frozenset(("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "element_size",
                   "stride", "is_contiguous"))  # fmt: skip
ADDED = frozenset(("index_add_", "index_add", "__setitem__"))
RULES: dict[str, Callable[..., Made]] = {
    "__getitem__": _indexed,
    "index_select": _picked,
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(("reshape", "view", "flatten", "unsqueeze", "squeeze", "view_as", "unflatten"), _reshaped),
    **dict.fromkeys(("chunk", "split", "softmax", "log_softmax"), _along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normed),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), _reduced),
}
_ELEMENTWISE = """
    abs add sub mul div neg exp log sqrt rsqrt square pow sigmoid tanh relu relu6 gelu silu mish elu selu celu softplus
    softsign leaky_relu hardtanh hardswish hardsigmoid logsigmoid clamp clamp_min clamp_max maximum minimum
    sin cos erf reciprocal type_as to float double half bfloat16 type contiguous clone detach
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __itruediv__
    __neg__ __pow__ add_ sub_ mul_ div_ relu_ silu_ true_divide multiply divide
"""
_POINTWISE = frozenset(_ELEMENTWISE.split())
# Not everywhere finite; of a division that is so of what is divided by.
_DIVISIONS = frozenset(("div", "__truediv__", "__itruediv__", "true_divide", "divide", "div_"))
_PARTIAL = _DIVISIONS | {"exp", "log", "sqrt", "rsqrt", "pow", "__pow__", "reciprocal"}
