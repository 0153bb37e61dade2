"""Element-wise ops in primitive expressions. NaN goes through comparisons as in eager: relu and clamp keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.ops.op_facts import SIGNS
from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType
from autopar.runtime.triton.lowering.rules_activations import tl_abs
from autopar.runtime.triton.lowering.values import Operand, Value, cast, constant, point, where, wide
from autopar.runtime.triton.lowering.view_maps import expanded, last_place, trailing

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


def _divide(types: Types, a: Operand, b: Operand) -> Value:
    """Rounded to nearest, as eager does; Triton's own division of float32 is off by up to two places."""
    exactly = "tl.div_rn({0}, {1})" if wide(types[0].dtype) == torch.float32 else "{0} / {1}"
    return arithmetic(exactly)(types, a, b)


def root(x: Value) -> Value:
    """Rounded to nearest likewise."""
    return point("tl.sqrt_rn({0})" if x.dtype == torch.float32 else "tl.sqrt({0})", x)


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
    half = root(x) if exponent in (0.5, -0.5, 1.5) else x
    made: dict[float, Callable[[], Value]] = {
        0: lambda: x * 0 + 1, 1: lambda: x, 2: lambda: x * x, 3: lambda: x * x * x, 4: lambda: (x * x) * (x * x),
        -1: lambda: 1 / x, -2: lambda: 1 / (x * x), 0.5: lambda: half, -0.5: lambda: 1 / half, 1.5: lambda: x * half,
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
    """exp(x - lse) as exp(x - near) exp(-rest), near + rest = lse in two numbers of what x is computed in."""
    lse = where(point("{0} == {1}", lse, -math.inf, dtype=torch.bool), 0, lse)
    near, scale = cast(lse, x.dtype), grad
    if lse.dtype != x.dtype:
        rest = where(point("{0} == {1}", tl_abs(near), math.inf, dtype=torch.bool), 0, cast(lse - near, x.dtype))
        scale = grad * point("tl.exp({0})", -rest)
    taken = where(one_hot(index, offset, x.shape[-1]), trailing(grad if picked is None else picked), 0)
    return trailing(scale) * point("tl.exp({0})", x - trailing(near)) - taken


COMPARISONS: Mapping[Any, Rule] = {
    getattr(getattr(_aten, name), kind): _compare(sign) for name, sign in SIGNS.items() for kind in ("Scalar", "Tensor")
}
RULES: Mapping[Any, Rule] = {
    _aten.add.Tensor: arithmetic("{0} + {1}"),
    _aten.add.Scalar: arithmetic("{0} + {1}"),
    _aten.sub.Tensor: arithmetic("{0} - {1}"),
    _aten.sub.Scalar: arithmetic("{0} - {1}"),
    _aten.rsub.Scalar: _rsub,
    _aten.mul.Tensor: arithmetic("{0} * {1}"),
    _aten.mul.Scalar: arithmetic("{0} * {1}"),
    _aten.div.Tensor: _divide,
    _aten.div.Scalar: _divide,
    _aten.minimum.default: lambda types, a, b: smaller(_in(wide(types[0].dtype), a), _in(wide(types[0].dtype), b)),
    _aten.maximum.default: lambda types, a, b: larger(_in(wide(types[0].dtype), a), _in(wide(types[0].dtype), b)),
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: lambda types, x, low: _clamp(types, x, low),
    _aten.clamp_max.default: lambda types, x, high: _clamp(types, x, None, high),
    _aten.neg.default: _unary("-{0}"),
    _aten.abs.default: _unary("tl.abs({0})"),
    _aten.exp.default: _unary("tl.exp({0})"),
    _aten.log.default: _unary("tl.log({0})"),
    _aten.sqrt.default: lambda types, x: root(x),
    _aten.rsqrt.default: _unary("tl.rsqrt({0})"),
    _aten.reciprocal.default: _unary("1 / {0}"),
    _aten.erf.default: _unary("tl.erf({0})"),
    _aten.exp2.default: _unary("tl.exp2({0})"),
    _aten.mse_loss.default: lambda types, x, y, *_: (x - y) * (x - y),
    _aten.mse_loss_backward.default: lambda types, grad, x, y, *_: 2 * (x - y) * grad,
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
    **COMPARISONS,
    op("pick_backward"): _pick_backward,
    op("cross_entropy_backward"): _cross_entropy_backward,
}
