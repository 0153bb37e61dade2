"""Ops that make a tensor of a given shape. Each rank makes its own piece if all elements are alike."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import FIRST, NONE, Linear, argument, build, named, names_of, replicated_rule
from autopar.passes.rules.rule import Call, Row, Rule


def _alike(call: Call) -> Rule:
    return build(call, [], [named(call.results[0].shape)])


def _like(call: Call, linear: Linear) -> Rule:
    """new_zeros and its kin: the operand only lends its dtype. If it has the result's shape, layouts may follow it.

    Otherwise its names are contracted, which is right for zeros (a sum of zeros) and must not be for others.
    """
    result = named(call.results[0].shape)
    if call.operands[0].shape == call.results[0].shape:
        return build(call, [result], [result], linear=linear)
    operand = named(call.operands[0].shape, "a")
    return build(call, [operand], [result], replicated=() if linear else names_of(operand), linear=linear)


def _new_full(call: Call) -> Rule:
    return _like(call, FIRST if argument(call, 2, "fill_value") == 0 else NONE)


ROWS: Mapping[str, Row] = {
    "aten.full.default": Row(_alike, shape_arg=0),
    "aten.zeros.default": Row(_alike, shape_arg=0),
    "aten.ones.default": Row(_alike, shape_arg=0),
    "aten.empty.memory_format": Row(_alike, shape_arg=0),
    "aten.scalar_tensor.default": Row(_alike),
    "aten.new_zeros.default": Row(lambda call: _like(call, FIRST), shape_arg=1),
    "aten.new_empty.default": Row(lambda call: _like(call, FIRST), shape_arg=1),
    "aten.new_ones.default": Row(lambda call: _like(call, NONE), shape_arg=1),
    "aten.new_full.default": Row(_new_full, shape_arg=1),
    # Elements that depend on their place: every rank makes the whole, which costs no communication.
    "aten.arange.default": Row(replicated_rule),
    "aten.arange.start": Row(replicated_rule),
    "aten.arange.start_step": Row(replicated_rule),
    **{
        f"aten.{name}.{overload}": Row(replicated_rule)
        for name in ("linspace", "logspace")
        for overload in ("default", "Tensor_Scalar", "Scalar_Tensor", "Tensor_Tensor")
    },
    "aten.eye.default": Row(replicated_rule),
    "aten.eye.m": Row(replicated_rule),
    "aten.triu_indices.default": Row(replicated_rule),
    "aten.tril_indices.default": Row(replicated_rule),
}
