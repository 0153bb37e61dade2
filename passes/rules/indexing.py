"""Ops that look up or add by index. The indexed dim is replicated, or cut contiguously where the op has an `offset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.passes.rules.build import (
    FIRST,
    NONE,
    Linear,
    argument,
    build,
    dim_argument,
    named,
    names_of,
    replace_dim,
    replicated_rule,
    with_owners,
)
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Dims, Row, Rule

FIRST_AND_THIRD: Linear = (frozenset({0, 2}),)


def _embedding(call: Call) -> Rule:
    rule = instantiate("v h, ... -> ... h", call, indexed={"v"}, linear=({0},))
    return with_owners(rule, rule.operands[1], "v")


def _embedding_backward(call: Call) -> Rule:
    """grad [*index, *rest], index [*index] -> [rows, *rest]"""
    grad, index = call.operands
    dims = named(grad.shape)
    rest = dims[len(index.shape) :]
    rows = named(call.results[0].shape[:1], "v")
    rule = build(call, [dims, dims[: len(index.shape)]], [(*rows, *rest)], linear=FIRST)
    return with_owners(replace(rule, indexed=frozenset(names_of(rows))), rule.operands[1], "v0")


def _aten_embedding(call: Call) -> Rule:
    return instantiate("v h, ... -> ... h", call, replicated={"v"}, linear=({0},))


def _aten_embedding_backward(call: Call) -> Rule:
    """Scaling by frequency needs all indices."""
    replicated = {"v", "..."} if argument(call, 4, "scale_grad_by_freq", False) else {"v"}
    return instantiate("... h, ... -> v h", call, replicated=replicated, linear=({0},))


def _checked(call: Call) -> Rule:
    return instantiate("... -> ...", call)


def _pick(call: Call) -> Rule:
    return instantiate("... v, ... -> ...", call, indexed={"v"}, linear=({0},))


def _cross_entropy_backward(call: Call) -> Rule:
    if len(call.operands) == 5:
        return instantiate("..., ... v, ..., ..., ... -> ... v", call, indexed={"v"}, linear=({0, 4},))
    return instantiate("..., ... v, ..., ... -> ... v", call, indexed={"v"}, linear=({0},))


def _pick_backward(call: Call) -> Rule:
    return instantiate("..., ... -> ... v", call, indexed={"v"}, linear=({0},))


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Names of self[indices]: of `self`, of the index operands, of their broadcast and of the result; the names of
    `self` along which an index points.

    rows: for each index, 0, or the dim of the broadcast (from the right) in which it is the number of the row: what is
    looked up lies beside it, so that both have one name.
    """

    dims: Dims
    operands: list[Dims]
    index: Dims
    result: Dims
    replicated: set[str]


def _indexed(call: Call, first: int, rows: Sequence[int] = ()) -> _Indexed:
    """`first`: the position of the first index among the operands."""
    indices = list(argument(call, 1, "indices"))
    rows = [*rows, *[0] * (len(indices) - len(rows))]
    own = call.operands[0].shape
    used = call.operands[first : first + sum(index is not None for index in indices)]
    counts = [(own[dim], *[1] * (-row - 1)) for dim, row in enumerate(rows) if row]
    shape = tuple(torch.broadcast_shapes(*(type_.shape for type_ in used), *counts))
    names = named(shape, "i")
    operands = [
        tuple(() if size == 1 else names[len(shape) - len(type_.shape) + dim] for dim, size in enumerate(type_.shape))
        for type_ in used
    ]
    dims = named(own)
    for dim, row in enumerate(rows):
        dims = replace_dim(dims, dim, names[row]) if row else dims
    points = [index is not None or bool(row) for index, row in zip(indices, rows, strict=True)]
    replicated = {name for dim, index in enumerate(indices) if index is not None for name in dims[dim]}
    return _Indexed(dims, operands, names, _looked_up(dims, points, names), replicated)


def _looked_up(self_dims: Dims, points: list[bool], index: Dims) -> Dims:
    """The dims of self[indices], where those that `points` tells are looked up. Such dims apart from each other go to
    the front."""
    at = [dim for dim, point in enumerate(points) if point]
    kept = [(dim, name) for dim, name in enumerate(self_dims) if dim not in at]
    front = at[0] if at[-1] - at[0] + 1 == len(at) else 0
    before = tuple(name for dim, name in kept if dim < front)
    after = tuple(name for dim, name in kept if dim >= front)
    return (*before, *index, *after)


def _is_mask(call: Call, first: int, last: int) -> bool:
    return any(type_.dtype in (torch.bool, torch.uint8) for type_ in call.operands[first:last])


def _index(call: Call) -> Rule:
    if _is_mask(call, 1, len(call.operands)):
        return replicated_rule(call)
    indexed = _indexed(call, 1)
    return build(call, [indexed.dims, *indexed.operands], [indexed.result], replicated=indexed.replicated, linear=FIRST)


def _index_of_rows(call: Call) -> Rule:
    indexed = _indexed(call, 1, call.args[2])
    return build(call, [indexed.dims, *indexed.operands], [indexed.result], replicated=indexed.replicated, linear=FIRST)


def _index_put(call: Call) -> Rule:
    if _is_mask(call, 1, len(call.operands) - 1):
        return replicated_rule(call)
    return _put(call, _indexed(call, 1), bool(argument(call, 3, "accumulate", False)))


def _index_put_of_rows(call: Call) -> Rule:
    return _put(call, _indexed(call, 1, call.args[2]), call.args[4])


def _put(call: Call, found: _Indexed, adds: bool) -> Rule:
    """Indices are replicated where `self` lacks their names: each rank would add to, or keep, its own copy of self."""
    own = call.operands[-1].shape
    aligned = found.result[len(found.result) - len(own) :]
    values = tuple(() if size == 1 else dim for dim, size in zip(aligned, own, strict=True))
    replicated = found.replicated | (names_of(found.index) - names_of(found.dims))
    linear = (frozenset({0, len(call.operands) - 1}),) if adds else NONE
    return build(call, [found.dims, *found.operands, values], [found.dims], replicated=replicated, linear=linear)


def _beside(call: Call, index: int, others: tuple[int, ...], at: int) -> tuple[Dims, list[Dims], set[str]]:
    """Names of `self` and of the tensors beside it: alike off dim `at` where all sizes are, else whole."""
    dims = named(call.operands[0].shape)
    tensors = [call.operands[i].shape for i in (index, *others)]
    if not dims or any(len(shape) != len(dims) for shape in tensors):
        rule = replicated_rule(call)
        return rule.operands[0], [rule.operands[i] for i in (index, *others)], set(rule.replicated)
    replicated: set[str] = set(dims[at])
    beside: list[Dims] = [named(shape, f"j{i}_") for i, shape in enumerate(tensors)]
    for dim, name in enumerate(dims):
        alike = dim != at and all(shape[dim] == call.operands[0].shape[dim] for shape in tensors)
        if alike:
            beside = [replace_dim(one, dim, name) for one in beside]
        else:
            replicated |= {*name, *(n for one in beside for n in one[dim])}
    return dims, beside, replicated


def _gather(call: Call) -> Rule:
    """The index (and with it the result) may be split along every dim."""
    at = dim_argument(call, 1)
    dims, (index,), replicated = _beside(call, 1, (), at)
    replicated -= {name for name in (index[at] if index else ()) if name not in names_of(dims)}
    return build(call, [dims, index], [index], replicated=replicated, linear=FIRST)


def _scatter(linear: Linear | Callable[[Call], Linear] = NONE) -> Row:
    def rule(call: Call) -> Rule:
        at = dim_argument(call, 1)
        others = tuple(range(2, len(call.operands)))
        dims, beside, replicated = _beside(call, 1, others, at)
        passed = linear(call) if callable(linear) else linear
        return build(call, [dims, *beside], [dims], replicated=replicated, linear=passed)

    return Row(rule)


def _scatter_value(call: Call) -> Linear:
    return FIRST if argument(call, 3, "value") == 0 else NONE


def _scatter_reduce(call: Call) -> Linear:
    sums = argument(call, 4, "reduce") == "sum" and argument(call, 5, "include_self", True)
    return FIRST_AND_THIRD if sums else NONE


def _index_select(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 1)
    index = named(call.operands[1].shape, "i")
    if not dims:
        return build(call, [dims, index], [dims])
    result = replace_dim(dims, at, index[0] if index else ())
    return build(call, [dims, index], [result], replicated=dims[at], linear=FIRST)


def _searchsorted(call: Call) -> Rule:
    """Each value is looked up in all of its row, or of the only one."""
    sequence, values = named(call.operands[0].shape), named(call.operands[1].shape, "v")
    if len(sequence) > 1:
        values = (*sequence[:-1], *values[-1:])
    return build(call, [sequence, values, *[sequence] * (len(call.operands) - 2)], [values], replicated=sequence[-1])


def _bucketize(call: Call) -> Rule:
    """The first operand is looked up in the second."""
    values, ends = (named(type_.shape, kind) for type_, kind in zip(call.operands, "vb", strict=True))
    return build(call, [values, ends], [values], replicated=ends[0])


def _is_in(call: Call) -> Rule:
    """Each element is looked for in all of the second operand."""
    elements, among = (named(type_.shape, kind) for type_, kind in zip(call.operands, "ea", strict=True))
    return build(call, [elements, among], [elements], replicated=names_of(among))


def _index_into(linear: Linear) -> Row:
    """index_add and its kin: `source` (if any) has the index's length along the dim."""

    def rule(call: Call) -> Rule:
        at = dim_argument(call, 1)
        dims, index = named(call.operands[0].shape), named(call.operands[1].shape, "i")
        source = [named(type_.shape, "s") for type_ in call.operands[2:]]
        if not dims or any(len(one) != len(dims) and one for one in source):
            rule = replicated_rule(call)
            return Rule(rule.operands, rule.results, rule.sizes, rule.replicated, linear=linear)
        source = [replace_dim(dims, at, index[0] if index else ()) if one else one for one in source]
        return build(call, [dims, index, *source], [dims], replicated={*dims[at], *names_of(index)}, linear=linear)

    return Row(rule)


ROWS: Mapping[str, Row] = {
    "autopar.embedding.default": Row(_embedding),
    "autopar.embedding_backward.default": Row(_embedding_backward, size_arg=(2, "v0")),
    "autopar.checked_index.default": Row(_checked),
    "autopar.checked_values.default": Row(_checked),
    "autopar.pick.default": Row(_pick),
    "autopar.pick_backward.default": Row(_pick_backward, size_arg=(2, "v")),
    "autopar.cross_entropy_backward.default": Row(_cross_entropy_backward),
    "aten.embedding.default": Row(_aten_embedding),
    "aten.embedding_dense_backward.default": Row(_aten_embedding_backward),
    "aten.index.Tensor": Row(_index),
    "aten._unsafe_index.Tensor": Row(_index),
    "aten.index_put.default": Row(_index_put),
    "aten._unsafe_index_put.default": Row(_index_put),
    "autopar.index_of_rows.default": Row(_index_of_rows),
    "autopar.index_put_of_rows.default": Row(_index_put_of_rows),
    "aten.gather.default": Row(_gather),
    "aten.scatter.src": _scatter(),
    "aten.scatter.value": _scatter(_scatter_value),
    "aten.scatter.reduce": _scatter(),
    "aten.scatter_add.default": _scatter(FIRST_AND_THIRD),
    "aten.scatter_reduce.two": _scatter(_scatter_reduce),
    "aten.index_select.default": Row(_index_select),
    "aten.searchsorted.Tensor": Row(_searchsorted),
    "aten.bucketize.Tensor": Row(_bucketize),
    "aten.index_add.default": _index_into(FIRST_AND_THIRD),
    "aten.isin.Tensor_Tensor": Row(_is_in),
    "aten.index_reduce.default": _index_into(NONE),
    "aten.index_copy.default": _index_into(NONE),
    "aten.index_fill.int_Scalar": _index_into(NONE),
    "aten.index_fill.int_Tensor": _index_into(NONE),
}
