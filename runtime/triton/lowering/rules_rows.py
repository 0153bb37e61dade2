"""Ops that read whole rows, and sums over all rows, in primitive expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType
from autopar.runtime.triton.lowering.rules_activations import tl_abs
from autopar.runtime.triton.lowering.rules_points import one_hot
from autopar.runtime.triton.lowering.values import Operand, Value, cast, mean, point, reduced, summed_rows, where, wide
from autopar.runtime.triton.lowering.view_maps import shaped

_aten = torch.ops.aten
Types = Sequence[TensorType]
Rule = Callable[..., Any]


def _exp(x: Value) -> Value:
    return point("tl.exp({0})", x)


def _count(x: Value, dims: Any) -> int:
    """How many dims are reduced."""
    return 1 if isinstance(dims, int) else len(dims or x.shape)


def _sum(types: Types, x: Value, dims: Any = None, *_: Any, **__: Any) -> Value:
    x, count, rank = cast(x, wide(types[0].dtype)), _count(x, dims), len(x.shape)
    if count == rank:
        return summed_rows(x, 1)  # of which whoever launches it adds up the columns
    given = sorted(dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank)))
    if given == list(range(rank - count, rank)):
        return shaped(reduced("sum", x, count), types[0].shape)
    return shaped(summed_rows(x, rank - count), types[0].shape)


def _mean(types: Types, x: Value, dims: Any, *_: Any, **__: Any) -> Value:
    return shaped(mean(cast(x, wide(types[0].dtype)), _count(x, dims)), types[0].shape)


def _extreme(which: str) -> Rule:
    """The largest or the smallest of a row; NaN if one is."""

    def rule(types: Types, x: Value, dims: Any = (), *_: Any, **__: Any) -> Value:
        count = _count(x, dims)
        best = reduced(which, x, count)
        if x.dtype.is_floating_point:
            strange = reduced("sum", point("tl.where({0} != {0}, 1.0, 0.0)", x), count)
            best = where(point("{0} > 0", strange, dtype=torch.bool), math.nan, best)
        return shaped(best, types[0].shape)

    return rule


def _softmax(types: Types, x: Value, dim: int, *_: Any) -> Value:
    x = cast(x, wide(types[0].dtype))
    e = _exp(x - reduced("max", x, 1))
    return e / reduced("sum", e, 1)


def _log_softmax(types: Types, x: Value, dim: int, *_: Any) -> Value:
    x = cast(x, wide(types[0].dtype))
    shifted = x - reduced("max", x, 1)
    return shifted - point("tl.log({0})", reduced("sum", _exp(shifted), 1))


def _softmax_backward(types: Types, grad: Value, y: Value, *_: Any) -> Value:
    product = grad * y
    return product - y * reduced("sum", product, 1)


def _log_softmax_backward(types: Types, grad: Value, y: Value, *_: Any) -> Value:
    return grad - _exp(y) * reduced("sum", grad, 1)


def _logsumexp(types: Types, x: Value) -> Value:
    """-inf where all of a row is."""
    top = reduced("max", x, 1)
    top = where(point("{0} == {1}", tl_abs(top), math.inf, dtype=torch.bool), 0, top)
    total = point("tl.log({0})", cast(reduced("sum", _exp(x - top), 1), types[0].dtype)) + top
    return shaped(total, types[0].shape)


def _pick(types: Types, x: Value, index: Value, offset: Operand = 0) -> Value:
    return shaped(reduced("sum", where(one_hot(index, offset, x.shape[-1]), x, 0), 1), types[0].shape)


def _rms_norm(types: Types, x: Value, weight: Value, eps: float) -> tuple[Value, Value]:
    factor = point("tl.rsqrt({0})", mean(x * x, len(weight.shape)) + eps)
    return x * factor * weight, factor


def _rms_norm_backward(types: Types, grad: Value, x: Value, weight: Value, factor: Value) -> tuple[Value, Value]:
    dims = len(weight.shape)
    normal, scaled = x * factor, grad * weight
    return (scaled - normal * mean(scaled * normal, dims)) * factor, summed_rows(grad * normal, dims)


def _layer_norm(
    types: Types, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    dims = len(shape)
    middle = mean(x, dims)
    away = x - middle
    factor = point("tl.rsqrt({0})", mean(away * away, dims) + eps)
    y = away * factor
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, middle, factor


def _layer_norm_backward(
    types: Types, grad: Value, x: Value, shape: Sequence[int], middle: Value, factor: Value, weight: Value | None,
    bias: Value | None, mask: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    dims = len(shape)
    normal = (x - middle) * factor
    scaled = grad if weight is None else grad * weight
    dx = (scaled - mean(scaled, dims) - normal * mean(scaled * normal, dims)) * factor
    return dx, summed_rows(grad * normal, dims) if mask[1] else None, summed_rows(grad, dims) if mask[2] else None


RULES: Mapping[Any, Rule] = {
    _aten.sum.dim_IntList: _sum,
    _aten.sum.default: _sum,
    _aten.mean.dim: _mean,
    _aten.amax.default: _extreme("max"),
    _aten.amin.default: _extreme("min"),
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    op("logsumexp"): _logsumexp,
    op("pick"): _pick,
    op("rms_norm"): _rms_norm,
    op("rms_norm_backward"): _rms_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
