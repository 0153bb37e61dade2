"""Ops that only rename, merge or divide dims: view, transpose, expand, squeeze ... All are linear."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.rules.build import (
    FIRST,
    argument,
    build,
    compound,
    dim_argument,
    dims_argument,
    named,
    names_of,
    replace_dim,
    replicated_rule,
)
from autopar.passes.rules.local import with_arg
from autopar.passes.rules.pointwise import pointwise
from autopar.passes.rules.rule import Arguments, Call, Dims, Namer, Pieces, Row, Rule


@functools.cache
def factorise(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Common names of two shapes of one size, and those that must be replicated.

    Both shapes are read from the left, and each name takes what the present dims have in common:
    (6,4) -> (2,12) gives (a b) c -> a (b c). Where neither size divides the other they share only the leading
    factor, and the rest is replicated: (6,4) -> (4,6) gives (a w) v -> (a u) t.
    """
    namer = Namer()
    replicated: set[str] = set()
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    left = (list(source), list(target))  # what is still to be named of each dim
    at = [0, 0]

    def skip(side: int) -> None:
        while at[side] < len(left[side]) and left[side][at[side]] == 1:
            at[side] += 1

    while True:
        skip(0)
        skip(1)
        if at[0] == len(source) or at[1] == len(target):
            break
        sizes = left[0][at[0]], left[1][at[1]]
        common = math.gcd(*sizes)
        if common > 1:
            name = namer.new(common)
            for side in (0, 1):
                dims[side][at[side]].append(name)
                left[side][at[side]] //= common
        if common < min(sizes):
            _rest(namer, replicated, dims, left, at)
    named_ = tuple(tuple(tuple(dim) for dim in side) for side in dims)
    return named_[0], named_[1], namer.sizes, frozenset(replicated)


def _rest(
    namer: Namer,
    replicated: set[str],
    dims: tuple[list[list[str]], list[list[str]]],
    left: tuple[list[int], list[int]],
    at: list[int],
) -> None:
    """Give each side whole names of its own until both have covered the same number of elements."""
    covered = [1, 1]
    while covered[0] != covered[1] or covered[0] == 1:
        side = 0 if covered[0] <= covered[1] else 1
        size = left[side][at[side]]
        if size > 1:
            name = namer.new(size)
            replicated.add(name)
            dims[side][at[side]].append(name)
            covered[side] *= size
        left[side][at[side]] = 1
        at[side] += 1


def _view(call: Call) -> Rule:
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in source:
        return replicated_rule(call)
    operand, result, sizes, replicated = factorise(source, target)
    return Rule((operand,), (result,), sizes, replicated, linear=FIRST)


def _in_groups(call: Call) -> Rule:
    """Rule of `in_groups`, a view; a second operand has the dims of the result already."""
    view = _view(call)
    rest = len(call.operands) - 1
    return replace(view, operands=(*view.operands, *view.results * rest))


def _in_microbatches_local(pieces: Pieces) -> Arguments:
    return with_arg(pieces.call.args, 1, pieces.shapes[0][0]), dict(pieces.call.kwargs)


def _permuted(call: Call, order: tuple[int, ...]) -> Rule:
    dims = named(call.operands[0].shape)
    return build(call, [dims], [tuple(dims[dim] for dim in order)], linear=FIRST)


def _permute(call: Call) -> Rule:
    return _permuted(call, dims_argument(call, 1, "dims"))


def _transpose(call: Call) -> Rule:
    order = list(range(len(call.operands[0].shape)))
    if order:
        a, b = dim_argument(call, 1, "dim0"), dim_argument(call, 2, "dim1")
        order[a], order[b] = order[b], order[a]
    return _permuted(call, tuple(order))


def _t(call: Call) -> Rule:
    return _permuted(call, tuple(reversed(range(len(call.operands[0].shape)))))


def _unsqueeze(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 1, ndim=len(dims) + 1)
    return build(call, [dims], [(*dims[:at], (), *dims[at:])], linear=FIRST)


def _squeezed(call: Call, gone: tuple[int, ...], replicated: set[str]) -> Rule:
    dims = named(call.operands[0].shape)
    result = tuple(dim for at, dim in enumerate(dims) if at not in gone or dim)
    return build(call, [dims], [result], replicated=replicated, linear=FIRST)


def _squeeze(call: Call) -> Rule:
    """Keep those of the dims to be dropped that are larger than 1: they must not become 1 on a rank."""
    ndim = len(call.operands[0].shape)
    dims = dims_argument(call, 1) if len(call.args) > 1 or "dim" in call.kwargs else tuple(range(ndim))
    names = named(call.operands[0].shape)
    return _squeezed(call, dims, {name for dim in dims for name in names[dim]} if names else set())


def _squeeze_dims(call: Call) -> Rule:
    return _squeezed(call, dims_argument(call, 1) if argument(call, 1, "dim") else (), set())


def _squeeze_dims_local(pieces: Pieces) -> Arguments:
    """Only the dims that have size 1 in the whole tensor."""
    shape = pieces.call.operands[0].shape
    dims = dims_argument(pieces.call, 1) if argument(pieces.call, 1, "dim") else ()
    return with_arg(pieces.call.args, 1, [dim for dim in dims if shape[dim] == 1]), dict(pieces.call.kwargs)


def _repeat(call: Call) -> Rule:
    """Every dim is (times, old size): which copy a rank would make is not for it to choose."""
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in target or 0 in source:
        return replicated_rule(call)
    dims = named(source)
    lead = len(target) - len(source)
    sizes = {dim[0]: size for dim, size in zip(dims, source, strict=True) if dim}
    result = []
    for at, size in enumerate(target):
        own = source[at - lead] if at >= lead else 1
        sizes[f"r{at}"] = size // own
        result.append((*compound(sizes, f"r{at}"), *(dims[at - lead] if at >= lead else ())))
    repeats = {name for name in sizes if name.startswith("r")}
    return build(call, [dims], [tuple(result)], replicated=repeats, sizes=sizes, linear=FIRST)


def _roll(call: Call) -> Rule:
    """The shape stays; the dims that are named are replicated."""
    dims = named(call.operands[0].shape)
    moved = dims_argument(call, 2, "dims") if dims else ()
    return build(call, [dims], [dims], replicated={n for dim in moved for n in dims[dim]}, linear=FIRST)


def _flip(call: Call) -> Rule:
    """Turn a dim round in mirrored pieces, of which a rank has the first rows and the last: they change places."""
    dims = named(call.operands[0].shape)
    turned = dims_argument(call, 1, "dims") if dims else ()
    names = frozenset(name for dim in turned for name in dims[dim])
    return replace(build(call, [dims], [dims], linear=FIRST), reversed=names)


def _triangle(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    return build(call, [dims], [dims], replicated=names_of(dims[-2:]), linear=FIRST)


def _unfold(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    result = named(call.results[0].shape, "w")
    if not dims:
        return build(call, [dims], [result], replicated=names_of(result), linear=FIRST)
    at = dim_argument(call, 1, "dimension")
    windows = replace_dim(dims, at, result[at])
    replicated = {*dims[at], *result[at], *result[-1]}
    return build(call, [dims], [(*windows, result[-1])], replicated=replicated, linear=FIRST)


def _unfold_backward(call: Call) -> Rule:
    dims = named(call.results[0].shape)
    grad = named(call.operands[0].shape, "w")
    if not dims:
        return build(call, [grad], [dims], replicated=names_of(grad), linear=FIRST)
    at = dim_argument(call, 2, ndim=len(dims))
    windows = (*replace_dim(dims, at, grad[at]), grad[-1])
    return build(call, [windows], [dims], replicated={*dims[at], *grad[at], *grad[-1]}, linear=FIRST)


def _diagonal(call: Call, large: tuple[int, ...], small: tuple[int, ...], position: int) -> tuple[Dims, Dims]:
    """Two dims of `large` become the last of `small`."""
    dims = named(large)
    pair = {
        dim_argument(call, position, "dim1", 0, len(large)),
        dim_argument(call, position + 1, "dim2", 1, len(large)),
    }
    kept = tuple(dim for at, dim in enumerate(dims) if at not in pair)
    return dims, (*kept, () if small[-1] == 1 else ("w",))


def _diagonal_forward(call: Call) -> Rule:
    dims, result = _diagonal(call, call.operands[0].shape, call.results[0].shape, 2)
    return build(call, [dims], [result], replicated=names_of(dims) - names_of(result) | {"w"}, linear=FIRST)


def _diagonal_backward(call: Call) -> Rule:
    dims, grad = _diagonal(call, call.results[0].shape, call.operands[0].shape, 3)
    return build(call, [grad], [dims], replicated=names_of(dims) - names_of(grad) | {"w"}, linear=FIRST)


def _diagonal_scatter(call: Call) -> Rule:
    dims, source = _diagonal(call, call.operands[0].shape, call.operands[1].shape, 3)
    replicated = names_of(dims) - names_of(source) | {"w"}
    return build(call, [dims, source], [dims], replicated=replicated, linear=(frozenset({0, 1}),))


def _real_view(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    return build(call, [dims], [(*dims, ("w",))], replicated={"w"}, linear=FIRST)


def _complex_view(call: Call) -> Rule:
    dims = named(call.results[0].shape)
    return build(call, [(*dims, ("w",))], [dims], replicated={"w"}, linear=FIRST)


def _expand(call: Call) -> Rule:
    return pointwise(call, FIRST)


ROWS: Mapping[str, Row] = {
    "aten.view.default": Row(_view, shape_arg=1),
    "aten._unsafe_view.default": Row(_view, shape_arg=1),
    "aten.reshape.default": Row(_view, shape_arg=1),
    "aten.view_copy.default": Row(_view, shape_arg=1),
    "autopar.in_groups.default": Row(_in_groups),
    "autopar.in_microbatches.default": Row(_view, local=_in_microbatches_local),
    "aten.permute.default": Row(_permute),
    "aten.transpose.int": Row(_transpose),
    "aten.t.default": Row(_t),
    "aten.unsqueeze.default": Row(_unsqueeze),
    "aten.squeeze.default": Row(_squeeze),
    "aten.squeeze.dim": Row(_squeeze),
    "aten.squeeze.dims": Row(_squeeze_dims, local=_squeeze_dims_local),
    "aten.expand.default": Row(_expand, shape_arg=1),
    "aten.repeat.default": Row(_repeat),
    "aten.flip.default": Row(_flip),
    "aten.roll.default": Row(_roll),
    "aten.tril.default": Row(_triangle),
    "aten.triu.default": Row(_triangle),
    "aten.unfold.default": Row(_unfold),
    "aten.unfold_backward.default": Row(_unfold_backward, shape_arg=1),
    "aten.diagonal.default": Row(_diagonal_forward),
    "aten.diagonal_backward.default": Row(_diagonal_backward, shape_arg=1),
    "aten.diagonal_scatter.default": Row(_diagonal_scatter),
    "aten.view_as_real.default": Row(_real_view),
    "aten.view_as_complex.default": Row(_complex_view),
}
