"""Activations and their gradients in primitive expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.program import TensorType
from autopar.runtime.triton.lowering.values import Value, point, where

_aten = torch.ops.aten
Types = Sequence[TensorType]


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))"""
    return point("1 / (1 + tl.exp(-{0}))", x)


def tanh(x: Value) -> Value:
    """By the exponential; by its series near 0, where that would cancel. Its last term there is below 1e-9."""
    s = x * x
    series = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    small = tl_abs(x)
    e = point("tl.exp({0} * -2)", small)
    far = point("tl.where({0} < 0, -{1}, {1})", x, (1 - e) / (1 + e))
    limit = 0.25 if x.dtype == torch.float32 else 0.001
    return where(point("{0} < {1}", small, limit, dtype=torch.bool), series, far)


def tl_abs(x: Value) -> Value:
    return point("tl.abs({0})", x)


def _gelu(types: Types, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        return 0.5 * x * (1 + tanh(_inner(x)))
    return 0.5 * x * (1 + point("tl.erf({0})", x * math.sqrt(0.5)))


def _inner(x: Value) -> Value:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))


def _gelu_backward(types: Types, grad: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        t = tanh(_inner(x))
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * (x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    below = 0.5 * (1 + point("tl.erf({0})", x * math.sqrt(0.5)))
    return grad * (below + x * (point("tl.exp({0} * {0} * -0.5)", x) * (1 / math.sqrt(2 * math.pi))))


def _silu_backward(types: Types, grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return grad * (s * (1 + x * (1 - s)))


def _threshold_backward(types: Types, grad: Value, x: Value, threshold: float) -> Value:
    return where(point("{0} <= {1}", x, threshold, dtype=torch.bool), 0, grad)


def _leaky_slope(x: Value, slope: float) -> Value:
    """A number rather than a condition: of these a thread has few registers."""
    return point("tl.where({0} > 0, 1.0, {1})", x, slope)


def _leaky(types: Types, x: Value, slope: float = 0.01) -> Value:
    return x * _leaky_slope(x, slope)


def _leaky_backward(types: Types, grad: Value, x: Value, slope: float, is_result: bool) -> Value:
    return grad * _leaky_slope(x, slope)


def _softplus(types: Types, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    z = x * beta
    return where(point("{0} > {1}", z, threshold, dtype=torch.bool), x, log1p(point("tl.exp({0})", z)) / beta)


def _softplus_backward(types: Types, grad: Value, x: Value, beta: float, threshold: float) -> Value:
    z = x * beta
    return where(point("{0} > {1}", z, threshold, dtype=torch.bool), grad, grad * sigmoid(z))


def log1p(x: Value) -> Value:
    """log(1 + x), corrected for what the sum rounds away (Kahan)."""
    u = 1 + x
    corrected = point("tl.log({0})", u) * (x / (u - 1))
    is_far = point("{0} == {1}", u, math.inf, dtype=torch.bool)
    return where(point("{0} == 1", u, dtype=torch.bool), x, where(is_far, x, corrected))


def expm1(x: Value) -> Value:
    """exp(x) - 1, corrected likewise."""
    u = point("tl.exp({0})", x)
    corrected = (u - 1) * (x / point("tl.log({0})", u))
    is_far = point("({0} == {1}) | ({0} - 1 == -1)", u, math.inf, dtype=torch.bool)
    return where(point("{0} == 1", u, dtype=torch.bool), x, where(is_far, u - 1, corrected))


def _elu(types: Types, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return where(point("{0} > 0", x, dtype=torch.bool), x * scale, expm1(x * input_scale) * (alpha * scale))


def _between(x: Value, low: float, high: float) -> Value:
    return point("({0} > {1}) & ({0} < {2})", x, low, high, dtype=torch.bool)


def _hardtanh(types: Types, x: Value, low: float = -1, high: float = 1) -> Value:
    above = where(point("{0} < {1}", x, low, dtype=torch.bool), low, x)
    return where(point("{0} > {1}", above, high, dtype=torch.bool), high, above)


def _sixths(x: Value) -> Value:
    """relu6(x + 3) / 6"""
    return _hardtanh((), x + 3, 0, 6) * (1 / 6)


def _hardswish_backward(types: Types, grad: Value, x: Value) -> Value:
    inner = where(point("{0} <= -3", x, dtype=torch.bool), 0, grad * (x / 3 + 0.5))
    return where(point("{0} < 3", x, dtype=torch.bool), inner, grad)


RULES: Mapping[Any, Callable[..., Any]] = {
    _aten.sigmoid.default: lambda types, x: sigmoid(x),
    _aten.tanh.default: lambda types, x: tanh(x),
    _aten.relu.default: lambda types, x: where(point("{0} <= 0", x, dtype=torch.bool), 0, x),
    _aten.gelu.default: _gelu,
    _aten.silu.default: lambda types, x: x * sigmoid(x),
    _aten.gelu_backward.default: _gelu_backward,
    _aten.silu_backward.default: _silu_backward,
    _aten.tanh_backward.default: lambda types, grad, y: grad * (1 - y * y),
    _aten.sigmoid_backward.default: lambda types, grad, y: grad * (y * (1 - y)),
    _aten.threshold_backward.default: _threshold_backward,
    _aten.leaky_relu.default: _leaky,
    _aten.leaky_relu_backward.default: _leaky_backward,
    _aten.softplus.default: _softplus,
    _aten.softplus_backward.default: _softplus_backward,
    _aten.elu.default: _elu,
    _aten.hardtanh.default: _hardtanh,
    _aten.hardtanh_backward.default: lambda types, grad, x, low, high: where(_between(x, low, high), grad, 0),
    _aten.hardsigmoid.default: lambda types, x: _sixths(x),
    _aten.hardsigmoid_backward.default: lambda types, grad, x: where(_between(x, -3, 3), grad * (1 / 6), 0),
    _aten.hardswish.default: lambda types, x: x * _sixths(x),
    _aten.hardswish_backward.default: _hardswish_backward,
    _aten.log1p.default: lambda types, x: log1p(x),
    _aten.expm1.default: lambda types, x: expm1(x),
}
