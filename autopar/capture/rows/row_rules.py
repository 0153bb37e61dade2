"""What becomes of rows that a mask selects (see `selected.py`): by the rules of the ops that torch makes of a function.

The table that says how an op may be split says it here, too: what may be split along the rows takes each by itself.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import fx

from autopar.capture.ops.canonical import filled
from autopar.capture.ops.functions import ExpertMM
from autopar.capture.ops.raised_products import autocast
from autopar.capture.refusals.location import Line
from autopar.capture.trace.tracer import Tracer
from autopar.ir.ops.op_facts import NEUTRAL, facts_of, is_check, is_view
from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType, is_getitem
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import through
from autopar.torch_compat import no_function_modes, storage_of

aten = torch.ops.aten
Tensor = torch.Tensor
Run = Callable[..., Any]
Value = tuple[fx.Node, int]  # a node of a trace, and which of its results


@dataclass(slots=True)
class Guard:
    """A hook that makes the gradient of padding zero: beyond it, rows are added up in the gradient of what is not such
    rows. is_needed: that of the padding may be no number. Products leave it out; anything else may have no finite
    derivative where the model computes nothing."""

    valid: Tensor
    dim: int
    is_needed: bool = False

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.is_needed:
            return None
        with no_function_modes():  # no cast of the model's: a gradient has the dtype that it has
            return only_valid(grad, self.valid, self.dim)


@dataclass(frozen=True, slots=True)
class ValidRows:
    """The rows of a tensor along `dim`, of which those count where `valid` [n] is True; selected at a line."""

    tensor: Tensor  # held, so that its id stays its own
    valid: Tensor
    dim: int
    line: Line | None
    origin: Any  # the function that selected them
    shape: tuple[int, ...] = ()  # of the mask
    place: int | None = None  # of the places themselves, their dim of the mask
    may_specialize: bool = False  # the mask hangs on what a step leaves as it is
    columns: tuple[Tensor, ...] = ()  # the places of each dim, of which it is all or some, as nonzero() has them
    is_whole: bool = False  # the padding has what stands there for other rows
    repeats: Tensor | None = None  # the numbers [n] of which each stands all along its row
    guards: tuple[Guard, ...] = ()  # what their gradient passes before anything adds it up


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Rows as they were taken of a tensor, with what was added to them since; and what had been written to each."""

    rows: Tensor
    base: Tensor
    key: Any
    added: Tensor | None
    versions: tuple[int, ...]

    @staticmethod
    def of(rows: Tensor, base: Tensor, key: Any, added: Tensor | None = None) -> AddedRows:
        return AddedRows(rows, base, key, added, tuple(one._version for one in (rows, base, added) if one is not None))

    def is_as_it_was(self) -> bool:
        return self.versions == AddedRows.of(self.rows, self.base, self.key, self.added).versions


class Refused(Exception):
    """A function sees how many rows there are, or takes them together: the reason, as far as one is known."""


class KnownRows(Protocol):
    """What the rules ask of the rows that are known."""

    known: dict[int, ValidRows]
    tracer: Tracer | None

    def row_of(self, value: Any) -> ValidRows | None:
        """What a tensor is, if it is such rows."""

    def taken_of(self, rows: Any) -> AddedRows | None:
        """What rows are that nobody has written to since."""

    def in_range(self, index: Tensor) -> Tensor:
        """Numbers of rows with 0 for the padding."""


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times one matrix [k, n], and what is added to them."""

    x: Tensor
    matrix: Tensor
    bias: Tensor | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    return Product(input, weight.t(), bias) if weight.ndim == 2 else None


def _matmul(*operands: Any, **named: Any) -> Product | None:
    found = (*operands, *named.values())
    return Product(*found) if len(found) == 2 and all(isinstance(one, Tensor) for one in found) else None


def _addmm(*operands: Any, **named: Any) -> Product | None:
    return Product(*operands[1:], operands[0]) if len(operands) == 3 and not named else None


def _einsum(equation: Any, *operands: Any) -> Product | None:
    """ab,bc->ac or ab,cb->ac."""
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(one, Tensor) for one in operands):
        return None
    x, other = operands
    spelled = equation.replace(" ", "")
    if re.fullmatch(r"(\w)(\w),\2(\w)->\1\3", spelled):
        return Product(x, other)
    return Product(x, other.t()) if re.fullmatch(r"(\w)(\w),(\w)\2->\1\3", spelled) else None


_PRODUCTS: Mapping[str, Callable[..., Product | None]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
}


def product(selected: KnownRows, name: str, args: Any, kwargs: Any) -> tuple[Tensor, bool] | None:
    """The product of rows with one matrix, or of one with columns, of those that count alone; and whether something is
    added to it. None for another function, or another product."""
    found = _PRODUCTS[name](*args, **kwargs) if name in _PRODUCTS else None
    rows = None if found is None else selected.row_of(found.x)
    columns = None if found is None else selected.row_of(found.matrix)
    if found is not None and rows is None and columns is not None and found.bias is None:
        is_columns = columns.dim == 1 and found.x.ndim == found.matrix.ndim == 2 and found.x.is_floating_point()
        x, matrix = autocast(found.matrix.t(), found.x.t())
        return (_product_of(x, matrix, columns.valid).t(), False) if is_columns else None
    if found is None or rows is None or any(selected.row_of(one) for one in (found.matrix, found.bias)):
        return None
    x, matrix = found.x, found.matrix
    is_rows = matrix.ndim == 2 and rows.dim < x.ndim - 1 and x.shape[rows.dim] == math.prod(x.shape[:-1])
    if not is_rows or not x.is_floating_point():
        return None
    x, matrix = autocast(x, matrix)
    y = _product_of(x, matrix, rows.valid)
    return (y, False) if found.bias is None else (y + autocast(found.bias)[0], True)


def _product_of(x: Tensor, matrix: Tensor, valid: Tensor) -> Tensor:
    other = torch.where(valid, 0, 1)  # there is one matrix; the padding has none
    y: Tensor = ExpertMM.apply(x.reshape(-1, x.shape[-1]), matrix.unsqueeze(0), other)
    return y.reshape(*x.shape[:-1], matrix.shape[1])


def together(selected: KnownRows, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives that takes rows together (a sum, a mean, the largest), of those that count alone.
    NotImplemented for another one, and where it takes each row by itself."""
    name = getattr(function, "__name__", "").removeprefix("linalg_")
    rows = selected.row_of(args[0]) if args else None
    if rows is None or name not in NEUTRAL:
        return NotImplemented
    x, at, number = rows.tensor, 2 if "norm" in name else 1, NEUTRAL[name]
    if name in ("max", "min") and (args[1:] or kwargs):  # with places, or of two tensors
        return NotImplemented
    power = kwargs.get("p", kwargs.get("ord", (*args, 2)[1])) if at == 2 else 2
    if power not in ("fro", None) and not (isinstance(power, (int, float)) and power >= 0):
        return NotImplemented
    dims = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else None))
    dims = (dims,) if isinstance(dims, int) else dims or range(x.ndim)
    dims = {dim % max(x.ndim, 1) for dim in dims}
    if rows.dim not in dims:
        return NotImplemented
    if math.isinf(number) and not x.is_floating_point():
        number = (torch.iinfo(x.dtype).max if number > 0 else torch.iinfo(x.dtype).min) if x.dtype != torch.bool else 0
    counting = only_valid(x, rows.valid, rows.dim, number)
    dtype = kwargs.get("dtype", x.dtype)
    if name != "mean" or not dtype.is_floating_point:
        return run(function, counting, *args[1:], **kwargs)
    wide = torch.float32 if dtype.itemsize < 4 else dtype  # the sum of a short float has no room
    total = run(torch.sum, counting, *args[1:], **{**kwargs, "dtype": wide})
    return (total / (rows.valid.sum() * math.prod(x.shape[dim] for dim in dims if dim != rows.dim))).to(dtype)


def loss_of_rows(selected: KnownRows, run: Run, each: Run, function: Any, args: Any, kwargs: Any) -> Any:
    """A loss that takes the sum or the mean of rows, of those that count. each: the loss of each row by itself.
    NotImplemented for another function."""
    given = _arguments(function, args, kwargs)
    how = given.get("reduction")
    if how not in ("mean", "sum", "batchmean") or given.get("size_average", given.get("reduce")) is not None:
        return NotImplemented
    target = given.get("target")
    if "ignore_index" in given and isinstance(target, Tensor) and not target.is_floating_point():
        for name, number in (("input", 0), ("target", given["ignore_index"])):
            mine = selected.row_of(given[name])
            if mine is None or mine.dim:
                raise Refused("another tensor has as many rows of its own")
            given[name] = only_valid(given[name], mine.valid, 0, number)
        return run(function, **given)
    rows = each(function, (), {**given, "reduction": "none"})
    mine = selected.row_of(rows)
    if mine is None or (how == "batchmean" and mine.dim):
        raise Refused("it adds the rows up")
    total = together(selected, run, torch.mean if how == "mean" else torch.sum, (rows,), {})
    return total / mine.valid.sum() if how == "batchmean" else total


def _arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a loss by name, with its defaults; empty for what is none."""
    if not _has_reduction(function):
        return {}
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@cache
def _has_reduction(function: Any) -> bool:
    try:
        return inspect.signature(function).parameters["reduction"].default == "mean"
    except (KeyError, TypeError, ValueError):  # a builtin of torch, which has no signature
        return False


def follow_rows(nodes: Iterable[fx.Node], places: Mapping[Value, Split], count: int) -> dict[Value, Split]:
    """Where the results of some calls have rows, in the order in which torch ran them. places: of what they read.

    Raises Refused where one does not take each row by itself."""
    splits = dict(places)
    for node in nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        operands = [source_of(one) for one in _tensors_in((node.args, node.kwargs))]
        known = {i: splits[value] for i, value in enumerate(operands) if value in splits}
        if not known and len(operands) == 1 and facts_of(node.target).moves == "repeated":
            splits |= _repeated(node, count)
        if not known or (filled(node) is not None and not _is_alike(node)):
            continue
        # Rows that a mask selects stay at the places of the mask, by which dropout draws.
        way = through(_call_of(node), known, TABLE, count, moves=node.target is not op("dropout"))
        if isinstance(way, str):
            raise Refused(way)
        if way.adds_up:
            raise Refused("it adds the rows up")
        if any(at is not None and i not in known for i, at in enumerate(way.operands)):
            raise Refused("another tensor has as many rows of its own")
        splits |= {(node, i): at for i, at in enumerate(way.results) if at is not None}
    return splits


def _repeated(node: fx.Node, count: int) -> dict[Value, Split]:
    """Where a value that is repeated as often as there are rows has them, each the same."""
    given, made = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    before = (1,) * (len(made) - len(given)) + tuple(given)
    dims = [dim for dim, size in enumerate(made) if size == count and before[dim] == 1 and count > 1]
    return {(node, 0): (dims[0], 1)} if len(dims) == 1 else {}


def are_views(nodes: Iterable[fx.Node]) -> bool:
    """True if calls compute nothing: the gradient that passes them is the one that comes."""
    return all(is_getitem(node) or is_view(node.target) for node in nodes)


def source_of(node: fx.Node) -> Value:
    """The node of a trace that computes a tensor, and which of its tensor results it is."""
    if not is_getitem(node):
        return node, 0
    producer, index = node.args
    assert isinstance(producer, fx.Node) and isinstance(index, int)
    return producer, sum(isinstance(one, Tensor) for one in producer.meta["val"][:index])


def looks_up(node: fx.Node) -> bool:
    """True for a call that fails where a place is outside of what it takes, or puts, elements at."""
    is_lookup = is_check(node.target) or facts_of(node.target).moves in ("taken", "put", "added")
    return node.op == "call_function" and is_lookup


def _is_alike(node: fx.Node) -> bool:
    """True for what has the shape of its operand; other tensors that are made "new" take its dtype alone."""
    return str(node.target).endswith("_like.default")


def _call_of(node: fx.Node) -> Call:
    """A node of a trace as rules see it: an op in place as the op that it is, what only takes a shape as a copy."""
    name = str(node.target)
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        name = name.replace("_.", ".")
    if filled(node) is not None:
        name = "aten.clone.default"
    made = node.meta["val"]
    results = [one for one in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(one, Tensor)]
    operands = [one.meta["val"] for one in _tensors_in((node.args, node.kwargs))]
    return Call(name, node.args, node.kwargs, tuple(map(_type, operands)), tuple(map(_type, results)))


def _type(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), value.dtype)


def _tensors_in(args: Any) -> list[fx.Node]:
    """The tensors among the arguments of a node, in order."""
    tensors: list[fx.Node] = []
    fx.node.map_arg(args, lambda one: tensors.append(one) if isinstance(one.meta.get("val"), Tensor) else None)
    return tensors


def only_valid(rows: Tensor, valid: Tensor, dim: int, number: float = 0) -> Tensor:
    """Rows with a number for the padding."""
    return torch.where(valid.reshape(-1, *(1 for _ in rows.shape[dim + 1 :])), rows, number)


def puts_back(name: str) -> bool:
    """True for a function that puts rows into places, or adds them there."""
    base, is_index, what = name.removesuffix("_").partition("index_")
    is_put = bool(is_index) and not base and what in ("add", "put", "copy")
    return is_put or name in ("__setitem__", "scatter_add", "scatter_add_")


def repeated_rows(name: str, mine: ValidRows | None, result: Any) -> Tensor | None:
    """The numbers [n] of which a view of them has each all along its row; None for another call."""
    if mine is None or not isinstance(result, Tensor) or result.shape[:1] != mine.valid.shape or result._version:
        return None
    numbers = mine.tensor if mine.tensor.ndim == 1 else mine.repeats
    is_shown = storage_of(result) == storage_of(mine.tensor)
    is_column = result.numel() == result.shape[0] and is_shown
    is_wide = mine.repeats is not None and (is_shown or name == "repeat")
    return numbers if is_column or is_wide else None
