"""Rows of the table by brute force (autopar/custom_ops/brute_force.py), on samples of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autopar.runtime.executor.kernel_table  # noqa: F401  (registers the kernels of the semantic ops)
from autopar.custom_ops.brute_force import (
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
from autopar.custom_ops.brute_force import make_call as call_with
from autopar.errors import WrongRule
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call, Row

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
    name: str, one: Sample, row: Row | None = None, *, counts: Sequence[int] = (2, 3),
    outers: Sequence[int] = (1, 2, -2), pairs: bool = True,
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


def check_permuted(name: str, one: Sample, row: Row | None = None) -> int:
    """Every name that may be split at any place may be permuted too: what `passes/sorts/unsort.py` rests on. The number
    of names that were; a name that makes up a dim with others, or that an index points along, is none of them."""
    call, operands, results = make_call(name, one)
    rule = (row or TABLE[name]).rule(call)
    tensors = (*rule.operands, *rule.results)
    alone = [
        free
        for free in rule.names()
        if free not in rule.ordered
        and any((free,) in dims for dims in rule.operands)
        and all(sum(free in dim for dim in dims) == ((free,) in dims) for dims in tensors)
    ]
    for free in alone:
        order = torch.arange(rule.sizes[free]).roll(1)
        given = [_permuted(t, dims, free, order) for t, dims in zip(operands, rule.operands, strict=True)]
        args, kwargs = with_tensors([list(one.args), dict(one.kwargs)], given)
        for got, want, dims in zip(run(name, args, kwargs), results, rule.results, strict=True):
            wanted = _permuted(want, dims, free, order)
            if one.compare and not torch.allclose(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True):
                raise WrongRule(f"{name}: '{free}' may be split, but rows along it do not go through one by one")
    return len(alone)


def _permuted(tensor: torch.Tensor, dims: Any, name: str, order: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(dims.index((name,)), order) if (name,) in dims else tensor
