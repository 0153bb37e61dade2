"""Reductions, scans and sorts. A reduced name may be split where the op has a partial kind; else it is replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from autopar.passes.rules.build import (
    FIRST,
    NONE,
    Linear,
    argument,
    build,
    dim_argument,
    dims_argument,
    named,
    names_of,
    replace_dim,
)
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Dims, Row, Rule


def reduce(call: Call, dims: tuple[int, ...], *, partial: str | None = None, linear: Linear = NONE) -> Rule:
    """Every result lacks `dims`, or keeps them with size 1. Without a `partial` kind they are replicated."""
    names = named(call.operands[0].shape)
    kept: list[Dims] = []
    for result in call.results:
        if len(result.shape) == len(names):
            kept.append(tuple(() if dim in dims else name for dim, name in enumerate(names)))
        else:
            kept.append(tuple(name for dim, name in enumerate(names) if dim not in dims))
    gone = {name for dim in dims for name in names[dim]} if names else set()
    return build(
        call, [names], kept, replicated=gone if partial is None else (), partial=partial or "sum", linear=linear
    )


def _all(partial: str | None = None, linear: Linear = NONE) -> Row:
    return Row(lambda call: reduce(call, tuple(range(len(call.operands[0].shape))), partial=partial, linear=linear))


def _dims(partial: str | None = None, linear: Linear = NONE, position: int = 1) -> Row:
    return Row(lambda call: reduce(call, dims_argument(call, position), partial=partial, linear=linear))


def _sum(call: Call, dims: tuple[int, ...]) -> Rule:
    """Linear unless it first converts to a dtype that cuts off fractions."""
    source, target = call.operands[0].dtype, call.results[0].dtype
    fractions = source.is_floating_point or source.is_complex
    keeps = source is not torch.bool and (target.is_floating_point or target.is_complex or not fractions)
    partial = None if target is torch.bool else "sum"
    return reduce(call, dims, partial=partial, linear=FIRST if keeps else NONE)


def _vector_norm(call: Call) -> Rule:
    order = argument(call, 1, "ord", 2)
    partial = {1: "sum", math.inf: "max", -math.inf: "min"}.get(order)
    return reduce(call, dims_argument(call, 2), partial=partial)


def _histc(call: Call) -> Rule:
    """Counts add up if the bins do not depend on the data."""
    fixed = argument(call, 2, "min", 0) != argument(call, 3, "max", 0)
    dims = named(call.operands[0].shape)
    bins = named(call.results[0].shape, "bin")
    return build(call, [dims], [bins], replicated=names_of(bins) | (set() if fixed else names_of(dims)))


def _along(position: int, linear: Linear = NONE, default: int = 0) -> Row:
    """The dim is replicated; every operand and result has the shape of the first."""

    def rule(call: Call) -> Rule:
        dims = named(call.operands[0].shape)
        replicated = dims[dim_argument(call, position, default=default)] if dims else ()
        return build(
            call, [dims] * len(call.operands), [dims] * len(call.results), replicated=replicated, linear=linear
        )

    return Row(rule)


def _resized(position: int, default: int) -> Row:
    """The dim is replicated and has another size in the results."""

    def rule(call: Call) -> Rule:
        dims = named(call.operands[0].shape)
        if not dims:
            return build(call, [dims], [dims] * len(call.results))
        at = dim_argument(call, position, default=default)
        size = call.results[0].shape[at]
        result = replace_dim(dims, at, () if size == 1 else ("r",))
        return build(call, [dims], [result] * len(call.results), replicated=(*dims[at], "r"), sizes={"r": size})

    return Row(rule)


def _spec(spec: str, **marks: object) -> Callable[[Call], Rule]:
    return lambda call: instantiate(spec, call, **marks)  # type: ignore[arg-type]


def _renorm(call: Call) -> Rule:
    """What stands at one place of the dim is scaled by its own norm."""
    dims = named(call.operands[0].shape)
    replicated = names_of(dims) - set(dims[dim_argument(call, 2)])
    return build(call, [dims], [dims], replicated=replicated)


def _kthvalue(call: Call) -> Rule:
    return reduce(call, (dim_argument(call, 2, default=-1),))


ROWS: Mapping[str, Row] = {
    "aten.sum.default": Row(lambda call: _sum(call, tuple(range(len(call.operands[0].shape))))),
    "aten.sum.dim_IntList": Row(lambda call: _sum(call, dims_argument(call, 1))),
    "aten.mean.default": _all(linear=FIRST),
    "aten.mean.dim": _dims(linear=FIRST),
    "aten.amax.default": _dims("max"),
    "aten.amin.default": _dims("min"),
    "aten.max.default": _all("max"),
    "aten.min.default": _all("min"),
    "aten.aminmax.default": _dims(),
    "aten.any.default": _all(),
    "aten.any.dim": _dims(),
    "aten.any.dims": _dims(),
    "aten.all.default": _all(),
    "aten.all.dim": _dims(),
    "aten.all.dims": _dims(),
    "aten.prod.default": _all(),
    "aten.prod.dim_int": _dims(),
    "aten.var.correction": _dims(),
    "aten.var.dim": _dims(),
    "aten.var.default": _all(),
    "aten.var_mean.correction": _dims(),
    "aten.std.correction": _dims(),
    "aten.std.dim": _dims(),
    "aten.std.default": _all(),
    "aten.argmax.default": _dims(),
    "aten.argmin.default": _dims(),
    "aten.max.dim": _dims(),
    "aten.min.dim": _dims(),
    "aten.median.dim": _dims(),
    "aten.median.default": _all(),
    "aten.nanmedian.dim": _dims(),
    "aten.nanmedian.default": _all(),
    "aten.mode.default": Row(lambda call: reduce(call, (dim_argument(call, 1, default=-1),))),
    "aten.std_mean.correction": _dims(),
    "aten.linalg_vector_norm.default": Row(_vector_norm),
    "aten.logsumexp.default": _dims("logsumexp"),
    "autopar.logsumexp.default": Row(_spec("... n -> ...", partial="logsumexp")),
    "aten.histc.default": Row(_histc),
    "aten.cumsum.default": _along(1, FIRST),
    "aten.cumprod.default": _along(1),
    "aten.logcumsumexp.default": _along(1),
    "aten.cummax.default": _along(1),
    "aten.cummin.default": _along(1),
    "aten.sort.default": _along(1, default=-1),
    "aten.sort.stable": _along(1, default=-1),
    "aten.argsort.default": _along(1, default=-1),
    "aten.topk.default": _resized(2, default=-1),
    "aten.renorm.default": Row(_renorm),
    "aten.kthvalue.default": Row(_kthvalue),
    "aten._softmax.default": _along(1),
    "aten._safe_softmax.default": _along(1),
    "aten._log_softmax.default": _along(1),
    "aten._softmax_backward_data.default": _along(2, FIRST),
    "aten._log_softmax_backward_data.default": _along(2, FIRST),
}
