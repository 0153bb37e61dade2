"""Ops that compute each element on its own, with broadcasting aligned at the last dim.

A name may be split wherever it stands; what differs between the ops is in which operands they are linear, so that a
partial sum may pass. Adding a Python number is not linear: each rank would add it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number

import torch

from autopar.passes.rules.build import FIRST, NONE, SECOND, Linear, argument, named
from autopar.passes.rules.rule import Call, Row, Rule

LinearOf = Callable[[Call], Linear]
BOTH: Linear = (frozenset({0, 1}),)
EITHER: Linear = (frozenset({0}), frozenset({1}))
BRANCHES: Linear = (frozenset({1, 2}),)

# Not linear in anything. Overloads are behind the name; none means default.
OTHERS = """
    abs acos acosh angle asin asinh atan atan2 atanh bitwise_not ceil celu clamp clamp:Tensor clamp_max
    clamp_max:Tensor clamp_min clamp_min:Tensor cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor
    floor_divide floor_divide:Scalar fmax fmin frac frexp:Tensor gelu hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit maximum minimum mish nan_to_num nextafter polar reciprocal
    relu relu6 round round:decimals rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt
    square tan tanh threshold trunc special_i0e special_i1 special_log_ndtr
    copysign:Scalar copysign:Tensor div:Tensor_mode div:Scalar_mode
    pow:Scalar pow:Tensor_Scalar pow:Tensor_Tensor fmod:Scalar fmod:Tensor remainder:Scalar remainder:Tensor
    remainder:Scalar_Tensor xlogy:Tensor xlogy:Scalar_Other xlogy:Scalar_Self
    bitwise_and:Scalar bitwise_and:Tensor bitwise_or:Scalar bitwise_or:Tensor bitwise_xor:Scalar bitwise_xor:Tensor
    bitwise_left_shift:Tensor bitwise_left_shift:Tensor_Scalar bitwise_right_shift:Tensor
    bitwise_right_shift:Tensor_Scalar __lshift__:Scalar __lshift__:Tensor __rshift__:Scalar __rshift__:Tensor
    gcd lcm igamma igammac ldexp:Tensor polygamma mvlgamma isin:Tensor_Scalar
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
    special_i1e special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_xlog1py special_xlog1py:self_scalar special_xlog1py:other_scalar special_zeta
    special_zeta:self_scalar special_zeta:other_scalar special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    eq:Scalar eq:Tensor ne:Scalar ne:Tensor lt:Scalar lt:Tensor le:Scalar le:Tensor gt:Scalar gt:Tensor ge:Scalar
    ge:Tensor log_sigmoid_forward _prelu_kernel ones_like full_like
"""
# Linear in the first operand, the others being no partial sums.
LINEAR_FIRST = """
    neg clone detach alias lift lift_fresh lift_fresh_copy contiguous _conj _conj_physical conj_physical resolve_conj
    resolve_neg _neg_view real imag deg2rad rad2deg positive div:Tensor div:Scalar mul:Scalar zeros_like
    gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward softplus_backward elu_backward
    hardtanh_backward hardsigmoid_backward hardswish_backward leaky_relu_backward log_sigmoid_backward mish_backward
    logit_backward hardshrink_backward softshrink_backward _prelu_kernel_backward native_dropout_backward
    rrelu_with_noise_backward
"""


def pointwise(call: Call, linear: Linear = NONE) -> Rule:
    """All results have one shape; operands are broadcast to it."""
    shape = call.results[0].shape
    dims = named(shape)
    operands = []
    for operand in call.operands:
        own = operand.shape
        if own == shape:
            operands.append(dims)
            continue
        assert len(own) <= len(shape), (call.op, own, shape)
        aligned = dims[len(shape) - len(own) :]
        operands.append(tuple(() if size == 1 else dim for dim, size in zip(aligned, own, strict=True)))
    sizes = {dim[0]: size for dim, size in zip(dims, shape, strict=True) if dim}
    if call.results[0].dtype is torch.bool:
        linear = NONE
    return Rule(tuple(operands), (dims,) * len(call.results), sizes, linear=linear)


def _row(linear: Linear | LinearOf = NONE) -> Row:
    if callable(linear):
        return Row(lambda call: pointwise(call, linear(call)))
    return Row(lambda call: pointwise(call, linear))


def _product(call: Call) -> Linear:
    """Linear in each of two tensors, and in a tensor times a number (which mul.Tensor may hold)."""
    return EITHER if len(call.operands) == 2 else FIRST


def _sum(call: Call) -> Linear:
    """Sums and differences are linear in both operands, and in one where the other is the number 0: a loss of layers is
    often written as `total = 0`, `total = total + ...`."""
    if len(call.operands) == 2:
        return BOTH
    return FIRST if _is_zero(argument(call, 1, "other")) else NONE


def _to_copy(call: Call) -> Linear:
    """Conversions keep sums, up to rounding, unless they go through bool or cut off fractions.

    float64 becomes float32 when the sum is whole: what a step of float32 computes in float64, as logsumexp - pick, has
    large parts whose sum is small. (Gradients that are asked for in a shorter dtype are cast to a short float.)"""
    source, target = call.operands[0].dtype, call.results[0].dtype
    if (source, target) == (torch.float64, torch.float32):
        return NONE
    fractions = source.is_floating_point or source.is_complex
    keeps = target.is_floating_point or target.is_complex or not fractions
    return FIRST if keeps and source is not torch.bool else NONE


def _where(zero: int, linear: Linear) -> LinearOf:
    """One branch is a number: linear in the other if that number is 0."""
    return lambda call: linear if _is_zero(call.args[zero]) else NONE


def _is_zero(value: object) -> bool:
    return isinstance(value, Number) and value == 0


def _masked_fill(call: Call) -> Linear:
    return FIRST if _is_zero(argument(call, 2, "value")) else NONE


def _fill_value(call: Call) -> Linear:
    return FIRST if _is_zero(argument(call, 1, "fill_value", argument(call, 1, "value"))) else NONE


def _log_sigmoid(call: Call) -> Rule:
    """The buffer is empty on some devices: then only the others have names."""
    tensors = [*call.operands, *call.results]
    shape = call.operands[0].shape
    if all(type_.shape == shape for type_ in tensors):
        return pointwise(call, FIRST if len(call.operands) == 3 else NONE)
    dims, sizes = named(shape), dict(zip((f"d{i}" for i in range(len(shape))), shape, strict=True))
    empty = {"e": 0}
    each = [dims if type_.shape == shape else (("e",),) for type_ in tensors]
    count = len(call.operands)
    return Rule(
        tuple(each[:count]),
        tuple(each[count:]),
        sizes | empty,
        frozenset(empty),
        linear=FIRST if count == 3 else NONE,
    )


def _overloads(names: str) -> list[str]:
    overloads = []
    for name in names.split():
        base, _, overload = name.partition(":")
        overloads.append(f"aten.{base}.{overload or 'default'}")
    return overloads


ROWS: Mapping[str, Row] = {
    **{op: _row() for op in _overloads(OTHERS)},
    **{op: _row(FIRST) for op in _overloads(LINEAR_FIRST)},
    "aten.add.Tensor": _row(_sum),
    "aten.add.Scalar": _row(_sum),
    "aten.sub.Tensor": _row(_sum),
    "aten.sub.Scalar": _row(_sum),
    "aten.rsub.Tensor": _row(_sum),
    "aten.rsub.Scalar": _row(_sum),
    "aten.mul.Tensor": _row(_product),
    "aten.complex.default": _row(BOTH),
    "aten.lerp.Scalar": _row(BOTH),
    "aten.lerp.Tensor": _row(BOTH),
    "aten.copy.default": _row((*BOTH, *SECOND)),
    "aten.fill.Tensor": _row((*BOTH, *SECOND)),
    "aten.fill.Scalar": _row(_fill_value),
    "aten.full_like.default": _row(_fill_value),
    "aten.empty_like.default": _row(FIRST),
    "aten.addcmul.default": _row((frozenset({0, 1}), frozenset({0, 2}))),
    "aten.addcdiv.default": _row((frozenset({0, 1}),)),
    "aten._to_copy.default": _row(_to_copy),
    "aten.where.self": _row(BRANCHES),
    "aten.where.Scalar": _row(),
    "aten.where.ScalarOther": _row(_where(2, SECOND)),
    "aten.where.ScalarSelf": _row(_where(1, SECOND)),
    "aten.masked_fill.Scalar": _row(_masked_fill),
    "aten.masked_fill.Tensor": _row((frozenset({0, 2}),)),
    "aten.log_sigmoid_forward.default": Row(_log_sigmoid),
    "aten.log_sigmoid_backward.default": Row(_log_sigmoid),
}
