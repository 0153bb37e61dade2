"""Rows of the table by brute force (autopar/rule_check.py), on samples of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autopar.runtime.kernels  # noqa: F401  (registers the kernels of the semantic ops)
from autopar.errors import WrongRule
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call, Row
from autopar.rule_check import (
    Split,
    Tensors,
    check_linear,
    check_split,
    make_trial,
    pair_up,
    splits_of,
    tensors_in,
    with_tensors,
)
from autopar.rule_check import make_call as call_with

__all__ = [
    "Checked",
    "Sample",
    "WrongRule",
    "check",
    "make_call",
    "op_of",
    "run",
    "sample",
    "tensors_in",
    "with_tensors",
]

aten = torch.ops.aten


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], rstd: torch.Tensor, weight: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """PyTorch has no CPU kernel of it: the chain rule for x * rstd * weight."""
    dims = tuple(range(-len(shape), 0))
    scaled = grad if weight is None else grad * weight
    grad_x = rstd * (scaled - x * rstd**2 * (scaled * x).mean(dims, keepdim=True))
    grad_weight = (grad * x * rstd).flatten(0, -len(shape) - 1).sum(0)
    return tuple(one if on else None for one, on in zip((grad_x, grad_weight), wanted, strict=True))


# A view's strides are those of the whole value; pieces are computed with reshape, as the capture writes it.
RUN_AS: Mapping[Any, Callable[..., Any]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.view_copy.default: torch.reshape,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}


@dataclass(frozen=True, slots=True)
class Checked:
    """How much was checked of one call."""

    splits: int
    linear: int
    names: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments for one op; `compare=False` for those whose values mean nothing (empty)."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    compare: bool = True


def sample(*args: Any, compare: bool = True, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, compare)


def op_of(name: str) -> Any:
    """The overload with this name."""
    namespace, base, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)


def _function(name: str) -> Callable[..., Any]:
    op = op_of(name)
    found: Callable[..., Any] = RUN_AS.get(op, op)
    return found


def run(name: str, args: Any, kwargs: Any) -> Tensors:
    return tensors_in([_function(name)(*args, **kwargs)])


def make_call(name: str, one: Sample) -> tuple[Call, Tensors, Tensors]:
    """The call with its operands and its results."""
    return call_with(name, _function(name), one.args, one.kwargs)


def check(
    name: str, one: Sample, row: Row | None = None, *, counts: Sequence[int] = (2, 3), outers: Sequence[int] = (1, 2),
    pairs: bool = True,
) -> Checked:  # fmt: skip
    """Every name that may be split, each alone, then some two at once; and every linear set."""
    table = TABLE if row is None else {name: row}
    trial = make_trial(name, _function(name), one.args, one.kwargs, table, one.compare)
    rule = trial.rule
    # inf - inf is no partial sum
    finite = one.compare and all(bool(t.isfinite().all()) for t in (*trial.operands, *trial.results))
    linear = sum(check_linear(trial, which) for which in rule.linear) if finite else 0
    splits: list[Split] = []
    for split_name in rule.names():
        splits += splits_of(rule, split_name, counts, outers)
    for split in splits:
        check_split(trial, [split])
    both = pair_up(splits) if pairs else []
    for pair in both:
        check_split(trial, pair)
    return Checked(len(splits) + len(both), linear, len(rule.names()))
