"""Rows that a mask selects (`torch.where(mask)`, `mask.nonzero(as_tuple=True)`): as many as the data say.

A loop over experts takes the tokens of each, and adds what comes out to their rows. Here all places of the mask are
taken, and those where it is False are padding, which nobody may see: what is made of such rows is followed through the
model, and every function on the way must take each row by itself. Where they are added back the padding adds nothing.
Products leave it out at run time, as those by expert do, so that a loop over experts computes no more than it should.

How many rows there are shows nowhere in the tensors. So that no number is made of it, the second run of the capture
(see `determinism.py`) has one row, and whatever depends on the number differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.constructs import SIZES, Construct
from autopar.capture.explain import size_refusal
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


class Refused(Exception):
    """A function sees how many rows there are, or takes them together."""


@dataclass(slots=True)
class Selected:
    """The tensors of a run whose rows a mask selected. is_first: of the run that is captured; a later one has one row
    and is not looked at."""

    is_first: bool = True
    known: dict[int, Rows] = field(default_factory=dict)
    is_inside: bool = False  # of a call that is followed: torch may spell it out in calls of its own

    def concerns(self, args: Any, kwargs: Any) -> bool:
        """True if a call takes such rows."""
        return bool(self.known) and not self.is_inside and next(self.rows_in((args, kwargs)), None) is not None

    def select(self, function: Any, condition: Tensor, line: Line | None) -> tuple[Tensor, ...]:
        """The places of all elements of a condition, in torch's order."""
        valid = (condition != 0).reshape(-1)
        count = valid.numel() if self.is_first else min(valid.numel(), 1)
        places, step = [], 1
        every = torch.arange(count, device=condition.device)
        for size in reversed(condition.shape):
            places.append((every // step) % max(size, 1))
            step *= size
        places.reverse()
        for dim, place in enumerate(places if self.is_first else ()):
            self.known[id(place)] = Rows(place, valid, 0, line, function, tuple(condition.shape), dim)
        return tuple(places)

    def rows_in(self, value: Any) -> Iterator[Rows]:
        """Those among the arguments of a call."""
        if isinstance(value, Tensor):
            found = self.known.get(id(value))
            if found is not None and found.tensor is value:
                yield found
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from self.rows_in(item)
        elif isinstance(value, dict):
            yield from self.rows_in(list(value.values()))

    def call(self, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        """A call that takes such rows. Raises CaptureError unless it takes each by itself."""
        rows, name = list(self.rows_in((args, kwargs))), getattr(function, "__name__", str(function))
        self.is_inside = True
        try:
            if any(one.valid is not rows[0].valid for one in rows):
                raise Refused
            return self._call(rows, name, run, function, args, kwargs)
        except (Refused, IndexError):
            raise size_refusal(_seen(rows[0], name), rows[0].line) from None
        finally:
            self.is_inside = False

    def _call(self, rows: list[Rows], name: str, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        if name in _KEPT:
            kept = run(function, *args, **kwargs)
            if isinstance(kept, Tensor):  # x.T, x.data
                raise Refused
            return kept
        if name in _ADDED:
            return self._added(name, rows[0], *args, **kwargs)
        if name in _RULES:
            result, dim = _RULES[name](self, rows, run, function, args, kwargs)
        else:
            result, dim = _pointwise(self, name, rows, run, function, args, kwargs)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            self.known[id(one)] = replace(rows[0], tensor=one, dim=dim, place=None)
        return result

    def check_leaving(self, results: Any) -> None:
        """Raise CaptureError if any of them leaves the model."""
        for one in self.rows_in(results):
            raise size_refusal(_seen(one, ""), one.line)

    def _row(self, value: Any) -> Rows | None:
        return next(self.rows_in(value), None) if isinstance(value, Tensor) else None

    def _added(self, name: str, rows: Rows, base: Tensor, *args: Any, **kwargs: Any) -> Any:
        """base[index] += rows, in which padding is zero. `base[index] = rows` adds what they differ by: two rows of one
        place would be torch's own fault."""
        if self._row(base) is not None:
            raise Refused
        if name == "__setitem__":
            key, value = args
            index = key[0] if isinstance(key, tuple) and key else key
            rest = key[1:] if isinstance(key, tuple) else ()
            if self._row(index) is None or any(one is not Ellipsis and one != slice(None) for one in rest):
                raise Refused
            if not isinstance(value, Tensor) or value.shape != (*index.shape, *base.shape[1:]):
                raise Refused
            before = self._at_places(base, [index]) if self._is_all(base, [index]) else base[index]
            change = _only_valid(value - before, rows.valid, 0).to(base.dtype)
            self._put_back("index_add_", base, 0, index, change, {})
            return None
        dim, index, source = (*args, *(kwargs[key] for key in ("dim", "index", "source")[len(args) :]))
        mine = self._row(source)
        dim = dim % max(base.ndim, 1)
        if self._row(index) is None or (mine is not None and mine.dim != dim):
            raise Refused
        options = {key: value for key, value in kwargs.items() if key == "alpha"}
        return self._put_back(name, base, dim, index, _only_valid(source, rows.valid, dim), options)

    def _put_back(self, name: str, base: Tensor, dim: int, index: Tensor, source: Tensor, options: Any) -> Tensor:
        """Rows added to their places; where these are all places of a dim, by a sum over the other one."""
        mine = self.known[id(index)]
        if mine.place is None or base.shape[dim] != mine.shape[mine.place]:
            made: Tensor = getattr(base, name)(dim, index, source, **options)
            return made
        others = [dim + other for other in range(len(mine.shape)) if other != mine.place]
        apart = source.reshape(*source.shape[:dim], *mine.shape, *source.shape[dim + 1 :])
        total = apart.sum(others) if others else apart
        return base.add_(total, **options) if name.endswith("_") else base.add(total, **options)

    def _is_all(self, base: Tensor, items: list[Any]) -> bool:
        """True if an index is made of the places of one mask, each as long as the dim it looks up, and of slices."""
        at, found = 0, []
        for item in items:
            if isinstance(item, Tensor):
                mine = self.known[id(item)]
                if mine.place is None or at >= base.ndim or base.shape[at] != mine.shape[mine.place]:
                    return False
                found.append(mine.place)
            elif item is not None and item != slice(None):
                return False
            at += item is not None
        return len(found) == len(set(found)) > 0

    def _at_places(self, base: Tensor, items: list[Any]) -> Tensor:
        """base[items] for all places of a mask: a matter of views, so that rows may be split. A copy, as an index gives
        it, for the model may write into it."""
        dims = [item for item in items if item is not None]
        dims += [slice(None)] * (base.ndim - len(dims))
        of = {self.known[id(item)].place: at for at, item in enumerate(dims) if isinstance(item, Tensor)}
        shape = next(self.known[id(item)].shape for item in dims if isinstance(item, Tensor))
        first = min(of.values())
        after = [at for at in range(first, base.ndim) if at not in of.values()]
        value = base.permute(*range(first), *(of[place] for place in sorted(of)), *after)  # type: ignore[type-var]
        for place in range(len(shape)):
            value = value if place in of else value.unsqueeze(first + place)
        value = value.expand(*base.shape[:first], *shape, *(base.shape[at] for at in after))
        value = value.reshape(*base.shape[:first], math.prod(shape), *(base.shape[at] for at in after))
        where = next(i for i, item in enumerate(items) if isinstance(item, Tensor))
        keys = [None if item is None else slice(None) for item in items if not isinstance(item, Tensor)]
        keys.insert(where, slice(None))
        made: Tensor = value[tuple(keys)].clone()
        return made


def _only_valid(rows: Tensor, valid: Tensor, dim: int) -> Tensor:
    return torch.where(valid.reshape(-1, *(1 for _ in rows.shape[dim + 1 :])), rows, 0)


def _seen(rows: Rows, name: str) -> Construct:
    known = SIZES[rows.origin]
    seen = f"{name.strip('_')}()" if name else "what the model returns"
    return Construct(
        known.name,
        f"{known.instead} Where its places choose rows, only what takes each row by itself may follow (layers, "
        f"activations, weights by row) until index_add_ puts them back; here {seen} does not.",
    )


# --- functions that take each row by itself: what they give, and the dim of the rows in it

Made = tuple[Any, int]


def _indexed(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """x[.., places, ..] of another tensor; or slices of the rows, none of them along their dim."""
    base, key = args
    items = list(key) if isinstance(key, tuple) else [key]
    mine = self._row(base)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (base.ndim - taken)
    if mine is not None:
        return run(function, *args), _sliced(items, mine.dim)
    advanced = [i for i, item in enumerate(items) if isinstance(item, (Tensor, int))]
    if any(isinstance(items[i], Tensor) and self._row(items[i]) is None for i in advanced):
        raise Refused
    if any(isinstance(items[i], bool) for i in advanced) or advanced[-1] - advanced[0] + 1 != len(advanced):
        raise Refused
    if self._is_all(base, items):
        return self._at_places(base, items), advanced[0]
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


def _picked(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """index_select of another tensor."""
    if self._row(args[0]) is not None or len(args) != 3 or kwargs:
        raise Refused
    dim = args[1] % max(args[0].ndim, 1)
    items = [*[slice(None)] * dim, args[2]]
    return (self._at_places(args[0], items) if self._is_all(args[0], items) else run(function, *args)), dim


def _linear(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """A product with one matrix: only of the rows that count."""
    input_, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    mine = self._row(input_)
    if mine is None or len(rows) > 1 or not mine.dim < input_.ndim - 1 or weight.ndim != 2:
        raise Refused
    return _product(mine, input_, weight.t(), bias), mine.dim


def _matmul(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    left, right = args
    mine = self._row(left)
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


def _reshaped(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """The rows' dim is found again where as many elements stand before it."""
    mine = self._row(args[0])
    if mine is None:
        raise Refused
    result = run(function, *args, **kwargs)
    before, count = math.prod(mine.tensor.shape[: mine.dim]), mine.tensor.shape[mine.dim]
    for dim, size in enumerate(result.shape):
        if size == count and math.prod(result.shape[:dim]) == before:
            return result, dim
    raise Refused


def _along(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """Parts or a softmax along another dim."""
    mine, position = self._row(args[0]), 2 if function.__name__ in ("chunk", "split") else 1
    dim = kwargs["dim"] if "dim" in kwargs else args[position] if len(args) > position else None
    if mine is None or len(rows) > 1 or not isinstance(dim, int) or dim % mine.tensor.ndim == mine.dim:
        raise Refused
    return run(function, *args, **kwargs), mine.dim


def _reduced(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """A sum or mean over other dims, which are named."""
    mine = self._row(args[0])
    dims = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if mine is None or len(rows) > 1 or not isinstance(dims, (tuple, list)) or not dims:
        raise Refused
    gone = {dim % mine.tensor.ndim for dim in dims}
    if any(isinstance(dim, bool) for dim in dims) or mine.dim in gone:
        raise Refused
    result = run(function, *args, **kwargs)
    return result, mine.dim if result.ndim == mine.tensor.ndim else mine.dim - sum(dim < mine.dim for dim in gone)


def _normed(self: Selected, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any) -> Made:
    """Over the last dims."""
    mine = self._row(args[0])
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if mine is None or len(rows) > 1 or not mine.dim < mine.tensor.ndim - len(shape):
        raise Refused
    return run(function, *args, **kwargs), mine.dim


def _pointwise(
    self: Selected, name: str, rows: list[Rows], run: Run, function: Any, args: Any, kwargs: Any
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


def _inside(self: Selected, value: Any) -> Any:
    """Ones in the padding: there the function may have no value, or none that is finite, and its gradient neither."""
    mine = self._row(value)
    if mine is None:
        return value
    return torch.where(mine.valid.reshape(-1, *(1 for _ in value.shape[mine.dim + 1 :])), value, 1)


_KEPT = frozenset(("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "element_size",
                   "stride", "is_contiguous"))  # fmt: skip
_ADDED = frozenset(("index_add_", "index_add", "__setitem__"))
_RULES: dict[str, Callable[..., Made]] = {
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
