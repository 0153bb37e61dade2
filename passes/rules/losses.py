"""Losses. A sum over elements is a partial sum; a mean is replicated: a piece does not know the count it divides by."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import (
    FIRST,
    NONE,
    Linear,
    argument,
    build,
    compound,
    dim_argument,
    named,
    replace_dim,
    replicated_rule,
)
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.pointwise import pointwise
from autopar.passes.rules.rule import Call, Dims, Row, Rule

NO_REDUCTION, MEAN, SUM = 0, 1, 2


def _elementwise(position: int) -> Row:
    """The loss of each element, summed as `reduction` (at `position`) says. Operands are broadcast to the first."""

    def rule(call: Call) -> Rule:
        reduction = argument(call, position, "reduction", MEAN)
        if reduction == NO_REDUCTION:
            return pointwise(call)
        if reduction == MEAN or any(operand.shape != call.operands[0].shape for operand in call.operands):
            return replicated_rule(call)
        dims = named(call.operands[0].shape)
        return build(call, [dims] * len(call.operands), [()])

    return Row(rule)


def _elementwise_backward(position: int) -> Row:
    def rule(call: Call) -> Rule:
        if argument(call, position, "reduction", MEAN) == MEAN:
            return replicated_rule(call)
        return pointwise(call, FIRST)

    return Row(rule)


def _weight(call: Call, at: int) -> str:
    return ", c" if argument(call, at, "weight") is not None else ""


def _nll(call: Call) -> Rule:
    """Classes are replicated; the two results are sums over the elements, or one of them is the loss of each."""
    reduction = argument(call, 3, "reduction")
    full, target = ("n c ...", "n ...") if len(call.operands[0].shape) > 1 else ("c", "")
    loss = target if call.results[0].shape == call.operands[1].shape and reduction == NO_REDUCTION else ""
    spec = f"{full}, {target}{_weight(call, 2)} -> {loss}, "
    replicated = {"c", "n", "..."} if reduction == MEAN else {"c"}
    return instantiate(spec, call, replicated=replicated)


def _nll_backward(call: Call) -> Rule:
    """A mean divides by the total weight, which is an argument: elements may be split."""
    full, target = ("n c ...", "n ...") if len(call.operands[1].shape) > 1 else ("c", "")
    grad = target if call.operands[0].shape == call.operands[2].shape else ""
    spec = f"{grad}, {full}, {target}{_weight(call, 3)},  -> {full}"
    return instantiate(spec, call, replicated={"c"}, linear=({0},))


def _row_by_row(spec: str, position: int) -> Row:
    """Margins between the classes of a row, which are replicated. Reduced losses the capture sums itself."""

    def rule(call: Call) -> Rule:
        is_batch = max(len(operand.shape) for operand in call.operands) > 1
        if argument(call, position, "reduction", MEAN) != NO_REDUCTION or not is_batch:
            return replicated_rule(call)
        left, right = spec.split(" -> ")
        weight = ", c" * (len(call.operands) > left.count(",") + 1)
        return instantiate(
            f"{left}{weight} -> {right}", call, replicated={"c"}, linear=({0},) if right == "n c" else ()
        )

    return Row(rule)


def _halves(position: int, linear: Linear) -> Row:
    """glu: a dim (c x) of two halves becomes x."""

    def rule(call: Call) -> Rule:
        backward = len(call.operands) == 2
        tall = call.operands[-1].shape
        at = dim_argument(call, position, default=-1, ndim=len(tall))
        dims = named(tall)
        sizes = {"c": 2, "x": tall[at] // 2}
        long: Dims = replace_dim(dims, at, compound(sizes, "c", "x"))
        short: Dims = replace_dim(dims, at, compound(sizes, "x"))
        operands, results = ([short, long], [long]) if backward else ([long], [short])
        return build(call, operands, results, replicated={"c"}, sizes=sizes, linear=linear)

    return Row(rule)


def _ctc(spec: str, linear: Linear) -> Row:
    """Each sample by itself."""
    return Row(lambda call: instantiate(spec, call, replicated={"t", "c", "s"}, linear=linear))


ROWS: Mapping[str, Row] = {
    "aten.mse_loss.default": _elementwise(2),
    "aten.smooth_l1_loss.default": _elementwise(2),
    "aten.huber_loss.default": _elementwise(2),
    "aten.soft_margin_loss.default": _elementwise(2),
    "aten.binary_cross_entropy.default": _elementwise(3),
    "aten.binary_cross_entropy_with_logits.default": _elementwise(4),
    "aten.mse_loss_backward.default": _elementwise_backward(3),
    "aten.smooth_l1_loss_backward.default": _elementwise_backward(3),
    "aten.huber_loss_backward.default": _elementwise_backward(3),
    "aten.soft_margin_loss_backward.default": _elementwise_backward(3),
    "aten.binary_cross_entropy_backward.default": _elementwise_backward(4),
    "aten.nll_loss_forward.default": Row(_nll),
    "aten.nll_loss2d_forward.default": Row(_nll),
    "aten.nll_loss_backward.default": Row(_nll_backward),
    "aten.nll_loss2d_backward.default": Row(_nll_backward),
    "aten.multi_margin_loss.default": _row_by_row("n c, n -> n", 5),
    "aten.multi_margin_loss_backward.default": _row_by_row("n, n c, n -> n c", 6),
    "aten.multilabel_margin_loss_forward.default": _row_by_row("n c, n c -> n, n c", 2),
    "aten.multilabel_margin_loss_backward.default": _row_by_row("n, n c, n c, n c -> n c", 3),
    "autopar.ctc_loss.default": _ctc("t n c, n s, n, n -> n", NONE),
    "autopar.ctc_loss_backward.default": _ctc("n, t n c, n s, n, n -> t n c", FIRST),
    "aten.glu.default": _halves(1, NONE),
    "aten.glu_backward.default": _halves(2, FIRST),
}
