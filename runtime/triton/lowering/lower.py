"""A fused group in primitive expressions: its operands, its domain of rows and columns, and its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import Fused
from autopar.ir.ops.measure import local_type, local_types
from autopar.ir.program import TensorType, is_getitem, record
from autopar.runtime.triton.lowering import rules_activations, rules_draws, rules_points, rules_rows, view_maps
from autopar.runtime.triton.lowering.values import SHORT, CannotEmit, Value, cast, rounded, wide
from autopar.runtime.triton.lowering.view_maps import shaped

RULES: Mapping[Any, view_maps.Rule] = MappingProxyType(
    {**rules_points.RULES, **rules_activations.RULES, **view_maps.RULES, **rules_rows.RULES, **rules_draws.RULES}
)
_aten = torch.ops.aten
REDUCTIONS = ("sum", "max", "min")
_TILE_WIDTH = 64  # columns that a domain without reductions has at least, if its dims allow
_LONGEST_OF_VECTOR = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that the kernel writes: its local type, and what it is of the domain: "all", "rows" or "columns".

    orders: the permutations of its dims that follow, innermost first; a kernel writes rows where they are.
    """

    value: Value
    type: TensorType
    extent: str
    orders: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LoweredGroup:
    """A group in primitive expressions.

    operands: the local types of its operands, None for an integer. rows, width: its domain.
    """

    name: str
    operands: tuple[TensorType | None, ...]
    results: tuple[Result, ...]
    rows: int
    width: int
    described: tuple[str, ...]  # of the operands and the results, for people

    @property
    def reductions(self) -> tuple[Value, ...]:
        """The reductions of rows, operands first."""
        return tuple(v for v in self.values() if v.op in REDUCTIONS)

    @property
    def has_columns(self) -> bool:
        return any(result.extent == "columns" for result in self.results)

    def values(self) -> Iterator[Value]:
        """All values that the results need, operands first."""
        return walk([result.value for result in self.results])


def walk(roots: Sequence[Value]) -> Iterator[Value]:
    """The values that some need and these themselves, operands first, each once."""
    done: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        value, is_ready = stack.pop()
        if is_ready:
            yield value
        elif id(value) not in done:
            done.add(id(value))
            stack.append((value, True))
            stack += [(arg, False) for arg in reversed(value.args)]


def lower(fused: Fused, exact: bool = False) -> LoweredGroup:
    """The group in primitive expressions. exact: every op rounds its result, as eager does. Raises CannotEmit."""
    made: dict[fx.Node, Any] = {}
    for place, node in enumerate(fused.placeholders):
        made[node] = _operand(place, node, fused.mesh)
    for node in fused.calls:
        made[node] = _call(node, made, fused.mesh, exact)
    has_rows = any(v.op in (*REDUCTIONS, "column") for v in walk([made[node] for node in fused.results]))
    peeled = [_peeled(node) if has_rows else (node, ()) for node in fused.results]
    values = [made[node] for node, _ in peeled]
    types = [local_type(node, fused.mesh) for node, _ in peeled]
    rows, width = _domain(values, types)
    results = tuple(
        replace(_result(v, t, rows, width), orders=orders)
        for v, t, (_, orders) in zip(values, types, peeled, strict=True)
    )
    operands = tuple(_type_of_operand(node, fused.mesh) for node in fused.placeholders)
    described = tuple(_described(node, fused.mesh) for node in (*fused.placeholders, *fused.results))
    return LoweredGroup(fused.name, operands, results, rows, width, described)


def _peeled(node: fx.Node) -> tuple[fx.Node, tuple[tuple[int, ...], ...]]:
    """The value of which a result is a permutation, and the orders of its dims."""
    orders: list[tuple[int, ...]] = []
    while node.target in (_aten.transpose.int, _aten.permute.default):
        source, *rest = (*node.args,)
        dims = list(range(len(record(node).type.shape)))
        given: Any = rest
        if node.target is _aten.transpose.int:
            a, b = given
            dims[a], dims[b] = dims[b], dims[a]
        else:
            dims = [dim % len(dims) for dim in given[0]]
        orders.insert(0, tuple(dims))
        assert isinstance(source, fx.Node)
        node = source
    return node, tuple(orders)


def _type_of_operand(node: fx.Node, mesh: Mesh) -> TensorType | None:
    return None if record(node).types[0] is None else local_type(node, mesh)


def _operand(place: int, node: fx.Node, mesh: Mesh) -> Value:
    type_ = _type_of_operand(node, mesh)
    if type_ is None:
        return Value("number", (), (), torch.int64, place)
    loaded = Value("load", (), type_.shape, wide(type_.dtype), place)
    return loaded


def _call(node: fx.Node, made: Mapping[fx.Node, Any], mesh: Mesh, exact: bool) -> Any:
    args: Any = fx.node.map_arg(node.args, lambda n: made[n])
    if is_getitem(node):
        return args[0][args[1]]
    rule = RULES.get(node.target)
    if rule is None:
        raise CannotEmit(f"no kernel is written for {node.target}")
    types = tuple(local_types(node, mesh))
    if node.target in rules_points.COMPARISONS:
        args = tuple(
            _as_stored(made[operand], record(operand).type.dtype) if isinstance(operand, fx.Node) else operand
            for operand in node.args
        )
    found = rule(types, *args, **fx.node.map_arg(dict(node.kwargs), lambda n: made[n]))
    if not isinstance(found, tuple):
        return _finished(found, types[0], node, exact)
    kept = iter(types)
    return tuple(None if one is None else _finished(one, next(kept), node, exact) for one in found)


def _as_stored(value: Value, dtype: torch.dtype) -> Value:
    """A value as it would be read from memory: what is compared with a rounded number is rounded as well. Else the
    largest element of a row, which another kernel wrote, is none of the row that is made here."""
    return rounded(value, dtype) if dtype in SHORT and value.op != "load" else value


def _finished(value: Value, type_: TensorType, node: fx.Node, exact: bool) -> Value:
    """The result of an op: computed in what its dtype is computed in, and rounded to that if asked to."""
    if type_.numel == 1 and _column_of(value) is not None:  # the sum of all elements, whose columns are added up later
        return value if value.name else replace(value, name=_named(node))
    assert value.shape == type_.shape or math.prod(value.shape) == 1 or value.op == "load", (node, value.shape, type_)
    value = cast(value, wide(type_.dtype))
    if exact and type_.dtype in SHORT and value.op not in ("view", "parts", "load"):
        value = rounded(value, type_.dtype)
    value = value if value.shape == type_.shape else view_maps.expanded(value, type_.shape)
    return value if value.op == "load" or value.name else replace(value, name=_named(node))


def _named(node: fx.Node) -> str:
    known = record(node)
    return "  ".join(
        part for part in (f"%{node.name}", str(node.target).removesuffix(".default"), known.source) if part
    )


def _described(node: fx.Node, mesh: Mesh) -> str:
    type_ = _type_of_operand(node, mesh)
    return f"%{node.name}" + ("" if type_ is None else f" {str(type_.dtype)[6:]}{list(type_.shape)}")


def _domain(values: Sequence[Value], types: Sequence[TensorType]) -> tuple[int, int]:
    """(rows, columns): those of the reductions, which must agree, or of the first result."""
    found = {
        (math.prod(v.args[0].shape) // width, width)
        for v in walk(values)
        if v.op in (*REDUCTIONS, "column")
        for width in [math.prod(v.args[0].shape[len(v.args[0].shape) - v.data :])]
    }
    if len(found) > 1:
        raise CannotEmit(
            f"it reads rows of {' and of '.join(sorted(f'{w:,} elements, {r:,} of them' for r, w in found))}"
        )
    if found:
        return found.pop()
    shape = max((t.shape for t in types), key=lambda s: (math.prod(s), len(s)))
    if len(shape) == 1:
        return _of_vector(shape[0])
    width, dims = 1, list(shape)
    while len(dims) > 1 and width < _TILE_WIDTH:
        width *= dims.pop()
    return math.prod(shape) // max(width, 1), width


def _of_vector(size: int) -> tuple[int, int]:
    """A vector as rows of the longest power of two that divides it, or as one row."""
    width = math.gcd(size, _LONGEST_OF_VECTOR)
    return (size // width, width) if width >= _TILE_WIDTH else (1, size)


def _result(value: Value, type_: TensorType, rows: int, width: int) -> Result:
    column = _column_of(value)
    if column is not None:
        return Result(column, type_, "columns")
    if type_.numel == rows * width:
        return Result(shaped(value, (rows, width)), type_, "all")
    if type_.numel == rows:
        return Result(shaped(value, (rows, 1)), type_, "rows")
    raise CannotEmit(f"a result has {type_.numel:,} elements, and its domain {rows:,} x {width:,}")


def _column_of(value: Value) -> Value | None:
    """The sum over all rows that a value is, seen in another shape; the cast of its dtype is that of the result."""
    while value.op != "column":
        is_whole = math.prod(value.shape) == (math.prod(value.args[0].shape) if value.args else 0)
        if len(value.args) != 1 or not is_whole or value.op not in ("view", "point"):
            return None
        if value.op == "point" and ".to(" not in value.data:
            return None
        value = value.args[0]
    return value
