"""Ops that move elements, as maps from where an element of the result is to where it lies in the operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.program import TensorType
from autopar.runtime.triton.lowering.index import ZERO, contiguous, flat, places
from autopar.runtime.triton.lowering.values import Index, Value, view

_aten = torch.ops.aten
Types = Sequence[TensorType]
_END = 2**62


def shaped(x: Value, shape: Sequence[int]) -> Value:
    """The same elements in another shape."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    strides = contiguous(shape)
    return view(x, shape, lambda index: places(flat(index, strides), x.shape))


def expanded(x: Value, shape: Sequence[int]) -> Value:
    """Repeated along new dims in front, and along those of size 1."""
    added = len(shape) - len(x.shape)

    def source(index: Index) -> Index:
        return tuple(ZERO if size == 1 else place for size, place in zip(x.shape, index[added:], strict=True))

    return view(x, shape, source)


def trailing(x: Value) -> Value:
    """With a last dim of size 1."""
    return view(x, (*x.shape, 1), lambda index: index[:-1])


def last_place(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """The place of each element along the last dim."""
    return Value("place", (), tuple(shape), dtype, len(shape) - 1)


def permuted(x: Value, dims: Sequence[int]) -> Value:
    dims = [dim % len(x.shape) for dim in dims]

    def source(index: Index) -> Index:
        return tuple(index[dims.index(dim)] for dim in range(len(dims)))

    return view(x, [x.shape[dim] for dim in dims], source)


def cut(x: Value, dim: int, start: int, size: int) -> Value:
    """`size` elements from `start` on, along a dim."""
    dim %= len(x.shape)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return view(x, shape, lambda index: (*index[:dim], index[dim] + start, *index[dim + 1 :]))


def joined(parts: Sequence[Value], dim: int, starts: Sequence[int], size: int, fill: float = 0) -> Value:
    """A dim of `size` in which each part begins at its start; `fill` where no part is."""
    like = parts[0]
    dim %= len(like.shape)
    shape = (*like.shape[:dim], size, *like.shape[dim + 1 :])
    dtype = like.dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return Value("parts", tuple(parts), shape, dtype, (dim, tuple(starts), fill))


def _cat(types: Types, parts: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(types[0].shape)
    parts = [part for part in parts if 0 not in part.shape]
    starts = [sum(part.shape[dim] for part in parts[:i]) for i in range(len(parts))]
    return joined(parts, dim, starts, types[0].shape[dim])


def _unsqueezed(x: Value, dim: int) -> Value:
    dim %= len(x.shape) + 1
    return shaped(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def _stack(types: Types, parts: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(types[0].shape)
    return _cat(types, [_unsqueezed(part, dim) for part in parts], dim)


def _slice(types: Types, x: Value, dim: int = 0, start: int | None = None, *_: Any) -> Value:
    first, dim = _start(start, x.shape[dim]), dim % len(x.shape)
    return cut(x, dim, first, types[0].shape[dim])


def _start(start: int | None, size: int) -> int:
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _select(types: Types, x: Value, dim: int, place: int) -> Value:
    dim %= len(x.shape)
    return shaped(cut(x, dim, place % x.shape[dim], 1), types[0].shape)


def _split(types: Types, x: Value, sizes: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    dim %= len(x.shape)
    split, start = [], 0
    for type_ in types:
        split.append(cut(x, dim, start, type_.shape[dim]))
        start += type_.shape[dim]
    return tuple(split)


def _slice_backward(types: Types, grad: Value, sizes: Any, dim: int, start: int, *_: Any) -> Value:
    size = types[0].shape[dim]
    return joined([grad], dim, [_start(start, size)], size)


def _select_backward(types: Types, grad: Value, sizes: Any, dim: int, place: int) -> Value:
    dim %= len(types[0].shape)
    size = types[0].shape[dim]
    return joined([_unsqueezed(grad, dim)], dim, [place % size], size)


def _pad(types: Types, x: Value, pads: Sequence[int], value: float = 0) -> Value:
    for i in range(0, len(pads), 2):
        dim = len(x.shape) - 1 - i // 2
        before, size = pads[i], x.shape[dim] + pads[i] + pads[i + 1]
        kept = cut(x, dim, max(-before, 0), min(x.shape[dim], x.shape[dim] + before, x.shape[dim] + pads[i + 1], size))
        x = kept if kept.shape[dim] == size else joined([kept], dim, [max(before, 0)], size, value)
    return x


def _flip(types: Types, x: Value, dims: Sequence[int]) -> Value:
    turned = {dim % len(x.shape) for dim in dims}

    def source(index: Index) -> Index:
        return tuple(p * -1 + (x.shape[d] - 1) if d in turned else p for d, p in enumerate(index))

    return view(x, x.shape, source)


def _reshape(types: Types, x: Value, *_: Any) -> Value:
    return shaped(x, types[0].shape)


def _transpose(types: Types, x: Value, a: int, b: int) -> Value:
    dims = list(range(len(x.shape)))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return permuted(x, dims)


def _same(types: Types, x: Value) -> Value:
    return x


Rule = Callable[..., Any]
RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(
        (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default,
         _aten.squeeze.dim, _aten.squeeze.dims), _reshape,
    ),
    _aten.permute.default: lambda types, x, dims: permuted(x, dims),
    _aten.transpose.int: _transpose,
    _aten.t.default: lambda types, x: permuted(x, range(len(x.shape) - 1, -1, -1)),
    _aten.expand.default: lambda types, x, *_, **__: expanded(x, types[0].shape),
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.slice_backward.default: _slice_backward,
    _aten.select_backward.default: _select_backward,
    _aten.constant_pad_nd.default: _pad,
    _aten.flip.default: _flip,
    _aten.alias.default: _same,
    _aten.detach.default: _same,
}  # fmt: skip
