"""A rule checked by brute force: run the op on pieces, put the results together, compare with the whole.

Used for the rows of the table (test_rules.py) and for rows that are wrong on purpose, which it must refuse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autopar.runtime.kernels  # noqa: F401  (registers the kernels of the semantic ops)
from autopar.ir.layout import Factor, Layout, combine, local_part, local_shape, replica_error
from autopar.ir.mesh import Mesh
from autopar.ir.program import TensorType
from autopar.passes.rules import TABLE, local_call, rule_of
from autopar.passes.rules.rule import Call, Dims, Reading, Row, Rule, allows

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
Split = tuple[str, int, int]  # (name, pieces, outer)


class WrongRule(AssertionError):
    """A rule that does not hold."""


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in the order of `operand_nodes`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [one for item in value for one in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors replaced, in order; `tensors` is used up."""
    if isinstance(value, torch.Tensor):
        return tensors.pop(0)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    return value


def run(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    op = op_of(name)
    return tensors_in([RUN_AS.get(op, op)(*args, **kwargs)])


def make_call(name: str, one: Sample) -> tuple[Call, list[torch.Tensor], list[torch.Tensor]]:
    """The call with its operands and its results."""
    operands = tensors_in([one.args, one.kwargs])
    results = run(name, one.args, one.kwargs)
    types = [[TensorType(tuple(t.shape), t.dtype) for t in tensors] for tensors in (operands, results)]
    return Call(name, one.args, one.kwargs, tuple(types[0]), tuple(types[1])), operands, results


def name_factors(size: int, cuts: Sequence[tuple[str, int, int]]) -> tuple[Factor, ...]:
    """A name of `size`, cut on axes with (axis, pieces, outer), written out to its last factor."""
    factors: list[Factor] = []
    position = 1
    for axis, pieces, outer in sorted(cuts, key=lambda cut: cut[2]):
        assert outer % position == 0
        if outer > position:
            factors.append(outer // position)
        factors.append(axis)
        position = outer * pieces
    return (*factors, size // position)


def layout_of(dims: Dims, rule: Rule, cuts: Mapping[str, list[tuple[str, int, int]]], partial: str | None) -> Layout:
    """The layout of a tensor when these names are cut; axes of names that it lacks are partial, if given a kind."""
    layout = []
    for dim in dims:
        factors: list[Factor] = []
        for name in dim:
            for factor in name_factors(rule.sizes[name], cuts.get(name, ())):
                if isinstance(factor, int) and factors and isinstance(factors[-1], int):
                    factors[-1] *= factor
                elif factor != 1:
                    factors.append(factor)
        while factors and isinstance(factors[-1], int):
            factors.pop()
        layout.append(tuple(factors))
    own = {name for dim in dims for name in dim}
    lost = {axis for name, cut in cuts.items() if name not in own for axis, _, _ in cut}
    return Layout(tuple(layout), tuple((axis, partial) for axis in sorted(lost)) if partial else ())


def reading_of(size: int, cuts: Sequence[tuple[str, int, int]], mesh: Mesh, coord: Mapping[str, int]) -> Reading:
    factors = name_factors(size, cuts)
    return tuple((mesh[f], 1, coord[f]) if isinstance(f, str) else (f, f, 0) for f in factors)


def check_shapes(rule: Rule, call: Call) -> None:
    """The names of each dim multiply to its size; no dim has a name of size 1."""
    tensors = (*rule.operands, *rule.results)
    types = (*call.operands, *call.results)
    if len(tensors) != len(types) or len(rule.operands) != len(call.operands):
        raise WrongRule(f"{call.op}: the rule has {len(tensors)} tensors, the call {len(types)}")
    for dims, type_ in zip(tensors, types, strict=True):
        sizes = tuple(math.prod(rule.sizes[name] for name in dim) for dim in dims)
        if sizes != type_.shape or any(rule.sizes[name] == 1 for dim in dims for name in dim):
            raise WrongRule(f"{call.op}: {dims} with {dict(rule.sizes)} is not {type_.shape}")


def check_split(
    call: Call, row: Row, rule: Rule, operands: list[torch.Tensor], results: list[torch.Tensor],
    splits: Sequence[Split], compare: bool,
) -> None:  # fmt: skip
    """Cut each name on an axis of its own; several cuts of one name nest as their `outer` say."""
    axes = [f"x{i}" for i in range(len(splits))]
    mesh = Mesh(tuple((axis, n) for axis, (_, n, _) in zip(axes, splits, strict=True)))
    cuts: dict[str, list[tuple[str, int, int]]] = {}
    for axis, (name, n, outer) in zip(axes, splits, strict=True):
        cuts.setdefault(name, []).append((axis, n, outer))
    read = {name for dims in rule.operands for dim in dims for name in dim}
    # A name that no operand has leaves nothing partial: a result without it is the same on all ranks.
    summed = {name: cut for name, cut in cuts.items() if name in read}
    wanted = [layout_of(dims, rule, cuts, None) for dims in rule.operands]
    layouts = [
        Layout(layout_of(dims, rule, cuts, None).dims, layout_of(dims, rule, summed, rule.partial).partial)
        for dims in rule.results
    ]
    sizes = {name: size // math.prod(n for _, n, _ in cuts.get(name, ())) for name, size in rule.sizes.items()}
    parts: list[list[torch.Tensor]] = [[] for _ in results]
    for coord in mesh.coords():
        shapes = [local_shape(tuple(r.shape), lay, mesh) for r, lay in zip(results, layouts, strict=True)]
        offset = None
        for name in rule.indexed & cuts.keys():
            assert len(cuts[name]) == 1 and cuts[name][0][2] == 1
            offset = coord[cuts[name][0][0]] * sizes[name]
        readings = {name: reading_of(rule.sizes[name], cut, mesh, coord) for name, cut in cuts.items()}
        args, kwargs = local_call(call, row, rule, shapes, sizes, offset, readings)
        local = [local_part(t, lay, mesh, coord).clone() for t, lay in zip(operands, wanted, strict=True)]
        args, kwargs = with_tensors([args, kwargs], local)
        made = run(call.op, args, kwargs)
        if [tuple(t.shape) for t in made] != shapes:
            raise WrongRule(f"{call.op}: split {splits}: shapes {[tuple(t.shape) for t in made]}, not {shapes}")
        for into, tensor in zip(parts, made, strict=True):
            into.append(tensor)
    for i, (expected, lay) in enumerate(zip(results, layouts, strict=True)):
        if compare:
            error = replica_error(parts[i], lay, mesh) if not expected.is_complex() else 0.0
            if error > 1e-10:
                raise WrongRule(f"{call.op}: split {splits}: result {i} {lay} differs between ranks by {error}")
            compare_values(combine(parts[i], lay, mesh), expected, f"{call.op}: split {splits}: result {i} {lay}")


def compare_values(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if found.shape != expected.shape:
        raise WrongRule(f"{where}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        tolerance = max(1e-10, 10 * torch.finfo(expected.dtype).eps)
        good = torch.allclose(found.to(expected.dtype), expected, tolerance, tolerance, equal_nan=True)
    else:
        good = torch.equal(found.to(expected.dtype), expected)
    if not good:
        raise WrongRule(f"{where}: values differ")


def check_linear(call: Call, operands: list[torch.Tensor], results: list[torch.Tensor], which: frozenset[int]) -> bool:
    """Random partial sums of the operands in `which` give partial sums of the results. False if not applicable."""
    if any(not (operands[i].is_floating_point() or operands[i].is_complex()) for i in which):
        return False
    parts: list[list[torch.Tensor]] = [[], []]
    for i, operand in enumerate(operands):
        share = torch.rand_like(operand) * 2 - 0.5 if i in which else None
        parts[0].append(operand if share is None else share)
        parts[1].append(operand if share is None else operand - share)
    made = []
    for part in parts:
        args, kwargs = with_tensors([list(call.args), dict(call.kwargs)], list(part))
        made.append(run(call.op, args, kwargs))
    for i, expected in enumerate(results):
        compare_values(made[0][i] + made[1][i], expected, f"{call.op}: partial sums of operands {sorted(which)}")
    return True


def check(
    name: str, one: Sample, row: Row | None = None, *, counts: Sequence[int] = (2, 3), outers: Sequence[int] = (1, 2),
    pairs: bool = True,
) -> Checked:  # fmt: skip
    """Every name that may be split, each alone, then some two at once; and every linear set."""
    call, operands, results = make_call(name, one)
    pair = rule_of(call, TABLE if row is None else {name: row})
    assert pair is not None, name
    rule, row = pair
    check_shapes(rule, call)
    # inf - inf is no partial sum
    finite = one.compare and all(bool(t.isfinite().all()) for t in (*operands, *results))
    linear = sum(check_linear(call, operands, results, which) for which in rule.linear) if finite else 0
    splits: list[Split] = []
    both = 0
    for split_name in rule.names():
        for n, outer in itertools.product(counts, outers):
            if allows(rule, split_name, n, outer):
                splits.append((split_name, n, outer))
                check_split(call, row, rule, operands, results, [splits[-1]], one.compare)
    for one_split, other in itertools.combinations(splits, 2) if pairs else ():
        apart = one_split[0] != other[0] and (one_split[1:], other[1:]) in (((2, 1), (2, 1)), ((3, 1), (2, 2)))
        nested = one_split[0] == other[0] and other[2] == one_split[1] == other[1] and one_split[2] == 1
        if apart or nested:
            check_split(call, row, rule, operands, results, [one_split, other], one.compare)
            both += 1
    return Checked(len(splits) + both, linear, len(rule.names()))
