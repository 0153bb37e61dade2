"""Rules computed from shapes: dims get names by position, and sizes are read off the call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.passes.rules.rule import Call, Dim, Dims, Rule

Linear = tuple[frozenset[int], ...]
FIRST: Linear = (frozenset({0}),)
SECOND: Linear = (frozenset({1}),)
NONE: Linear = ()


@functools.cache
def named(shape: tuple[int, ...], prefix: str = "d") -> Dims:
    """One name for each dim: d0, d1, ...; none for a dim of size 1."""
    return tuple(() if size == 1 else (f"{prefix}{dim}",) for dim, size in enumerate(shape))


def build(
    call: Call,
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    replicated: Iterable[str] = (),
    linear: Linear = NONE,
    partial: str = "sum",
    sizes: Mapping[str, int] | None = None,
    flops: int = 0,
) -> Rule:
    """The rule with these names; sizes of single names are the call's, `sizes` gives those of compound dims."""
    known = dict(sizes) if sizes else {}
    types = (*call.operands, *call.results)
    for dims, type_ in zip((*operands, *results), types, strict=True):
        for dim, size in zip(dims, type_.shape, strict=True):
            if len(dim) == 1:
                assert known.setdefault(dim[0], size) == size, (call.op, dim, known, size)
            else:
                assert math.prod(known[name] for name in dim) == size, (call.op, dim, known, size)
    return Rule(tuple(operands), tuple(results), known, frozenset(replicated), partial, linear, frozenset(), flops)


def replicated_rule(call: Call) -> Rule:
    """The rule in which nothing may be split: what an op gets that has no row."""
    operands = [named(type_.shape, f"a{i}_") for i, type_ in enumerate(call.operands)]
    results = [named(type_.shape, f"r{i}_") for i, type_ in enumerate(call.results)]
    return build(call, operands, results, replicated=names_of(*operands, *results))


def with_owners(rule: Rule, index: Dims, owners: str) -> Rule:
    """The rule of a call that may have rows where their owners are, by an index of these dims: if that is a vector. Of
    one row, or one owner, there is nothing to divide."""
    is_vector = len(index) == 1 and len(index[0]) == 1 and rule.sizes.get(owners, 1) > 1
    return replace(rule, owned=(index[0][0], owners)) if is_vector else rule


def names_of(*tensors: Dims) -> set[str]:
    """All names of some tensors."""
    return {name for dims in tensors for dim in dims for name in dim}


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or by name."""
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(name, default)


def dims_argument(call: Call, position: int, name: str = "dim", ndim: int | None = None) -> tuple[int, ...]:
    """The dims that a reduction names, from 0 up; all of them if it names none."""
    ndim = len(call.operands[0].shape) if ndim is None else ndim
    given = argument(call, position, name)
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return tuple(range(ndim))
    given = given if isinstance(given, (list, tuple)) else (given,)
    return tuple(dim % ndim if ndim else 0 for dim in given) if ndim else ()


def dim_argument(call: Call, position: int, name: str = "dim", default: int = 0, ndim: int | None = None) -> int:
    """One dim, from 0 up."""
    ndim = len(call.operands[0].shape) if ndim is None else ndim
    dim = argument(call, position, name, default)
    assert isinstance(dim, int)
    return dim % ndim if ndim else 0


def replace_dim(dims: Dims, at: int, dim: Dim) -> Dims:
    """`dims` with one of them replaced."""
    return (*dims[:at], dim, *dims[at + 1 :])


def compound(sizes: Mapping[str, int], *names: str) -> Dim:
    """A dim of these names without those of size 1."""
    return tuple(name for name in names if sizes[name] != 1)
