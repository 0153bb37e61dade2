"""Ops that look up or add by index. The indexed dim is replicated, or cut contiguously where the op has an `offset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
)
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Dims, Row, Rule

FIRST_AND_THIRD: Linear = (frozenset({0, 2}),)


def _embedding(call: Call) -> Rule:
    return instantiate("v h, ... -> ... h", call, indexed={"v"}, linear=({0},))


def _embedding_backward(call: Call) -> Rule:
    """grad [*index, *rest], index [*index] -> [rows, *rest]"""
    grad, index = call.operands
    dims = named(grad.shape)
    rest = dims[len(index.shape) :]
    rows = named(call.results[0].shape[:1], "v")
    rule = build(call, [dims, dims[: len(index.shape)]], [(*rows, *rest)], linear=FIRST)
    return replace(rule, indexed=frozenset(names_of(rows)))


def _aten_embedding(call: Call) -> Rule:
    return instantiate("v h, ... -> ... h", call, replicated={"v"}, linear=({0},))


def _aten_embedding_backward(call: Call) -> Rule:
    """Scaling by frequency needs all indices."""
    replicated = {"v", "..."} if argument(call, 4, "scale_grad_by_freq", False) else {"v"}
    return instantiate("... h, ... -> v h", call, replicated=replicated, linear=({0},))


def _checked_index(call: Call) -> Rule:
    return instantiate("... -> ...", call)


def _pick(call: Call) -> Rule:
    return instantiate("... v, ... -> ...", call, indexed={"v"}, linear=({0},))


def _cross_entropy_backward(call: Call) -> Rule:
    if len(call.operands) == 5:
        return instantiate("..., ... v, ..., ..., ... -> ... v", call, indexed={"v"}, linear=({0, 4},))
    return instantiate("..., ... v, ..., ... -> ... v", call, indexed={"v"}, linear=({0},))


def _pick_backward(call: Call) -> Rule:
    return instantiate("..., ... -> ... v", call, indexed={"v"}, linear=({0},))


def _index_names(call: Call, first: int) -> tuple[list[int | None], list[Dims], tuple[int, ...], list[str]]:
    """For each dim of `self` the operand that indexes it; the dims of the index operands; their broadcast shape."""
    indices = argument(call, 1, "indices")
    places: list[int | None] = []
    at = first
    for index in indices:
        places.append(None if index is None else at)
        at += index is not None
    used = call.operands[first:at]
    shape = tuple(torch.broadcast_shapes(*(type_.shape for type_ in used)))
    names = named(shape, "i")
    operands = [
        tuple(() if size == 1 else names[len(shape) - len(type_.shape) + dim] for dim, size in enumerate(type_.shape))
        for type_ in used
    ]
    return places, operands, shape, [name for dim in names for name in dim]


def _looked_up(self_dims: Dims, places: list[int | None], index: Dims) -> tuple[Dims, set[str]]:
    """The dims of self[indices], and the names that are indexed. Indices apart from each other go to the front."""
    places = [*places, *[None] * (len(self_dims) - len(places))]
    at = [dim for dim, place in enumerate(places) if place is not None]
    kept = [(dim, self_dims[dim]) for dim, place in enumerate(places) if place is None]
    adjacent = at[-1] - at[0] + 1 == len(at)
    front = at[0] if adjacent else 0
    before = tuple(dim for place, dim in kept if place < front)
    after = tuple(dim for place, dim in kept if place >= front)
    return (*before, *index, *after), {name for dim in at for name in self_dims[dim]}


def _is_mask(call: Call, first: int, last: int) -> bool:
    return any(type_.dtype in (torch.bool, torch.uint8) for type_ in call.operands[first:last])


def _index(call: Call) -> Rule:
    if _is_mask(call, 1, len(call.operands)):
        return replicated_rule(call)
    places, operands, shape, _ = _index_names(call, 1)
    dims = named(call.operands[0].shape)
    result, replicated = _looked_up(dims, places, named(shape, "i"))
    return build(call, [dims, *operands], [result], replicated=replicated, linear=FIRST)


def _index_put(call: Call) -> Rule:
    """Indices are replicated: each rank would add to, or keep, its own copy of self."""
    if _is_mask(call, 1, len(call.operands) - 1):
        return replicated_rule(call)
    places, operands, shape, indices = _index_names(call, 1)
    dims = named(call.operands[0].shape)
    target, replicated = _looked_up(dims, places, named(shape, "i"))
    own = call.operands[-1].shape
    aligned = target[len(target) - len(own) :]
    values = tuple(() if size == 1 else dim for dim, size in zip(aligned, own, strict=True))
    count = len(call.operands)
    linear = (frozenset({0, count - 1}),) if argument(call, 3, "accumulate", False) else NONE
    return build(call, [dims, *operands, values], [dims], replicated=replicated | set(indices), linear=linear)


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
    "autopar.checked_index.default": Row(_checked_index),
    "autopar.pick.default": Row(_pick),
    "autopar.pick_backward.default": Row(_pick_backward, size_arg=(2, "v")),
    "autopar.cross_entropy_backward.default": Row(_cross_entropy_backward),
    "aten.embedding.default": Row(_aten_embedding),
    "aten.embedding_dense_backward.default": Row(_aten_embedding_backward),
    "aten.index.Tensor": Row(_index),
    "aten._unsafe_index.Tensor": Row(_index),
    "aten.index_put.default": Row(_index_put),
    "aten._unsafe_index_put.default": Row(_index_put),
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
    "aten.index_copy.default": _index_into(NONE),
    "aten.index_fill.int_Scalar": _index_into(NONE),
    "aten.index_fill.int_Tensor": _index_into(NONE),
}
