"""Element-wise ops in primitive expressions. NaN goes through comparisons as in eager: relu and clamp keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.ops import op
from autopar.ir.program import TensorType
from autopar.runtime.triton.values import Operand, Value, cast, constant, point, where, wide
from autopar.runtime.triton.views import expanded, last_place, trailing

_aten = torch.ops.aten
Types = Sequence[TensorType]
Rule = Callable[..., Any]


def _in(dtype: torch.dtype, operand: Any) -> Any:
    return cast(operand, dtype) if isinstance(operand, Value) else operand


def arithmetic(expression: str) -> Rule:
    """A binary op computed in the dtype of its result; `alpha` multiplies the second operand."""

    def rule(types: Types, a: Operand, b: Operand, alpha: float = 1) -> Value:
        own = wide(types[0].dtype)
        a, b = _in(own, a), _in(own, b)
        return point(expression, a, b if alpha == 1 else b * alpha)

    return rule


def _rsub(types: Types, a: Value, b: Operand, alpha: float = 1) -> Value:
    own = wide(types[0].dtype)
    return point("{1} - {0}", _in(own, a) * alpha if alpha != 1 else _in(own, a), _in(own, b))


def _compare(sign: str) -> Rule:
    def rule(types: Types, a: Value, b: Operand) -> Value:
        if not isinstance(b, Value):
            fits = isinstance(b, bool) or a.dtype != torch.bool
            a = a if fits and (a.dtype.is_floating_point or isinstance(b, int)) else cast(a, torch.float32)
        return point(f"{{0}} {sign} {{1}}", a, b, dtype=torch.bool)

    return rule


def _unary(expression: str) -> Rule:
    return lambda types, x: point(expression, cast(x, wide(types[0].dtype)))


def _logical(expression: str) -> Rule:
    def rule(types: Types, *operands: Value) -> Value:
        return point(expression, *(cast(o, torch.bool) for o in operands))

    return rule


def _to_copy(types: Types, x: Value, **_: Any) -> Value:
    return cast(x, wide(types[0].dtype))


def _pow(types: Types, x: Value, exponent: float) -> Value:
    root = point("tl.sqrt({0})", x) if exponent in (0.5, -0.5, 1.5) else x
    made: dict[float, Callable[[], Value]] = {
        0: lambda: x * 0 + 1, 1: lambda: x, 2: lambda: x * x, 3: lambda: x * x * x, 4: lambda: (x * x) * (x * x),
        -1: lambda: 1 / x, -2: lambda: 1 / (x * x), 0.5: lambda: root, -0.5: lambda: 1 / root, 1.5: lambda: x * root,
    }  # fmt: skip
    return made[exponent]()


def larger(a: Operand, b: Operand) -> Value:
    """The maximum; NaN if one is."""
    return _chosen(">", a, b)


def smaller(a: Operand, b: Operand) -> Value:
    """The minimum; NaN if one is."""
    return _chosen("<", a, b)


def _chosen(sign: str, a: Operand, b: Operand) -> Value:
    return point(f"tl.where(({{0}} {sign} {{1}}) | ({{0}} != {{0}}), {{0}}, {{1}})", a, b)


def _clamp(types: Types, x: Value, low: Any = None, high: Any = None, **named: Any) -> Value:
    low, high = named.get("min", low), named.get("max", high)
    own = wide(types[0].dtype)
    x = cast(x, own)
    x = x if low is None else larger(x, _in(own, low))
    return x if high is None else smaller(x, _in(own, high))


def _where(types: Types, condition: Value, yes: Operand, no: Operand) -> Value:
    own = wide(types[0].dtype)
    yes = constant(yes, own) if not isinstance(yes, Value) else yes
    return where(condition, _in(own, yes), _in(own, no))


def _masked_fill(types: Types, x: Value, mask: Value, value: Operand) -> Value:
    return where(mask, _in(x.dtype, value), x)


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


def _full(types: Types, shape: Sequence[int], value: Any, **_: Any) -> Value:
    return expanded(constant(value, wide(types[0].dtype)), types[0].shape)


def _like(value: float | None) -> Rule:
    """`value` everywhere; the second argument if that is None."""

    def rule(types: Types, x: Any, given: Any = None, **_: Any) -> Value:
        return _full(types, (), given if value is None else value)

    return rule


def one_hot(index: Value, offset: Operand, width: int) -> Value:
    """True at column index - offset of rows of `width`."""
    local = trailing(index) - offset
    return point("{0} == {1}", last_place((*index.shape, width), local.dtype), local, dtype=torch.bool)


def _pick_backward(types: Types, grad: Value, index: Value, size: int, offset: Operand = 0) -> Value:
    return where(one_hot(index, offset, types[0].shape[-1]), trailing(grad), 0)


def _cross_entropy_backward(
    types: Types, grad: Value, x: Value, lse: Value, index: Value, picked: Value | None = None, offset: Operand = 0
) -> Value:
    shift = where(point("{0} == {1}", lse, -math.inf, dtype=torch.bool), 0, lse)
    taken = where(one_hot(index, offset, x.shape[-1]), trailing(grad if picked is None else picked), 0)
    return trailing(grad) * point("tl.exp({0})", x - trailing(shift)) - taken


RULES: Mapping[Any, Rule] = {
    _aten.add.Tensor: arithmetic("{0} + {1}"),
    _aten.add.Scalar: arithmetic("{0} + {1}"),
    _aten.sub.Tensor: arithmetic("{0} - {1}"),
    _aten.sub.Scalar: arithmetic("{0} - {1}"),
    _aten.rsub.Scalar: _rsub,
    _aten.mul.Tensor: arithmetic("{0} * {1}"),
    _aten.mul.Scalar: arithmetic("{0} * {1}"),
    _aten.div.Tensor: arithmetic("{0} / {1}"),
    _aten.div.Scalar: arithmetic("{0} / {1}"),
    _aten.minimum.default: lambda types, a, b: smaller(_in(wide(types[0].dtype), a), _in(wide(types[0].dtype), b)),
    _aten.maximum.default: lambda types, a, b: larger(_in(wide(types[0].dtype), a), _in(wide(types[0].dtype), b)),
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: lambda types, x, low: _clamp(types, x, low),
    _aten.clamp_max.default: lambda types, x, high: _clamp(types, x, None, high),
    _aten.neg.default: _unary("-{0}"),
    _aten.abs.default: _unary("tl.abs({0})"),
    _aten.exp.default: _unary("tl.exp({0})"),
    _aten.log.default: _unary("tl.log({0})"),
    _aten.sqrt.default: _unary("tl.sqrt({0})"),
    _aten.rsqrt.default: _unary("tl.rsqrt({0})"),
    _aten.reciprocal.default: _unary("1 / {0}"),
    _aten.erf.default: _unary("tl.erf({0})"),
    _aten.sin.default: _unary("tl.sin({0})"),
    _aten.cos.default: _unary("tl.cos({0})"),
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
    _aten.pow.Tensor_Scalar: _pow,
    _aten.where.self: _where,
    _aten.where.ScalarOther: _where,
    _aten.where.ScalarSelf: _where,
    _aten.masked_fill.Scalar: _masked_fill,
    _aten.masked_fill.Tensor: _masked_fill,
    _aten.logical_not.default: _logical("{0} == 0"),
    _aten.bitwise_not.default: _logical("{0} == 0"),
    _aten.logical_and.default: _logical("{0} & {1}"),
    _aten.bitwise_and.Tensor: _logical("{0} & {1}"),
    _aten.logical_or.default: _logical("{0} | {1}"),
    _aten.bitwise_or.Tensor: _logical("{0} | {1}"),
    _aten.bitwise_xor.Tensor: _logical("{0} ^ {1}"),
    _aten._to_copy.default: _to_copy,
    _aten.clone.default: lambda types, x, **_: x,
    _aten.full.default: _full,
    _aten.scalar_tensor.default: lambda types, value, **_: _full(types, (), value),
    _aten.zeros.default: _like(0),
    _aten.ones.default: _like(1),
    _aten.zeros_like.default: _like(0),
    _aten.ones_like.default: _like(1),
    _aten.full_like.default: _like(None),
    **{
        getattr(getattr(_aten, name), kind): _compare(sign)
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
        for kind in ("Scalar", "Tensor")
    },
    op("pick_backward"): _pick_backward,
    op("cross_entropy_backward"): _cross_entropy_backward,
}
