"""Rules of ops on tensors without dims, and with dims counted from the end: however a call is spelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_brute_force import Sample, check, make_call, op_of
from rule_samples_all import every_sample

from autopar.passes.rules import TABLE

# Ops of which torch does not survive some of these calls.
LEFT_OUT = ("pool", "conv", "norm", "grid", "upsample", "backward", "unfold", "lstm", "linalg")


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    return every_sample()


def scalar(arg: Any) -> Any:
    """The first number of each tensor, as a tensor without dims."""
    if isinstance(arg, torch.Tensor):
        return arg.flatten()[0].clone() if arg.numel() else arg
    return type(arg)(map(scalar, arg)) if isinstance(arg, (list, tuple)) else arg


def without_dims(one: Sample) -> Iterator[Sample]:
    """The calls that an op might take of tensors without dims: its dims are 0, or none of a list."""
    seen = set[str]()
    for dim in (None, 0):
        args: Any = tuple(
            dim if type(arg) is int and dim is not None else [] if dim is not None and is_dims(arg) else scalar(arg)
            for arg in one.args
        )
        if repr(args) not in seen:
            seen.add(repr(args))
            yield replace(one, args=args)


def is_dims(arg: Any) -> bool:
    return isinstance(arg, list) and bool(arg) and all(type(each) is int for each in arg)


def run(name: str, args: tuple[Any, ...], one: Sample) -> Any:
    """What torch gives; None for what it refuses."""
    try:
        with torch.no_grad():
            return op_of(name)(*args, **dict(one.kwargs))
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_dims(samples: dict[str, list[Sample]]) -> None:
    """Every op that torch takes them in."""
    torch.manual_seed(0)
    checked = set[str]()
    for name in sorted(TABLE):
        if not name.startswith("aten.") or any(word in name for word in LEFT_OUT):
            continue
        for one in (each for sample in samples[name][:3] for each in without_dims(sample)):
            if run(name, one.args, one) is not None:
                check(name, one)
                checked.add(name)
    assert len(checked) > 150, len(checked)


def from_the_end(name: str, one: Sample) -> Iterator[tuple[Any, ...]]:
    """The same call with another spelling of one of its dims."""
    names = [each.name for each in op_of(name)._schema.arguments]
    given = one.args[0] if one.args else None
    first = given[0] if isinstance(given, (tuple, list)) and given else given
    if not isinstance(first, torch.Tensor):
        return
    back = first.ndim + ("unsqueeze" in name or "stack" in name)  # dims of the result

    def other(dim: int) -> int:
        return dim - back if dim >= 0 else dim + back

    for at, (arg, said) in enumerate(zip(one.args, names, strict=False)):
        if said in ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim") and (type(arg) is int or is_dims(arg)):
            yield (*one.args[:at], other(arg) if type(arg) is int else list(map(other, arg)), *one.args[at + 1 :])


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(is_same, a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.filterwarnings("ignore")
def test_dims_counted_from_the_end(samples: dict[str, list[Sample]]) -> None:
    """Where torch gives the same numbers of all samples, the rule is the same."""
    torch.manual_seed(0)
    checked = set[str]()
    for name in sorted(TABLE):
        if not name.startswith("aten.") or any(word in name for word in LEFT_OUT):
            continue
        for one in samples[name][:4]:
            given = run(name, one.args, one)
            for args in from_the_end(name, one) if given is not None and one.compare else ():
                other = run(name, args, one)
                if other is None or not is_same(given, other) or not is_distinct(given):
                    continue
                spelled = replace(one, args=args)
                rules = [TABLE[name].rule(make_call(name, each)[0]) for each in (one, spelled)]
                assert rules[0] == rules[1], (name, one.args[1:], args[1:])
                check(name, spelled)
                checked.add(name)
    assert len(checked) > 30, sorted(checked)


def is_distinct(given: Any) -> bool:
    """Numbers that differ tell one dim from another."""
    first = given[0] if isinstance(given, (tuple, list)) else given
    return bool(first.numel() > 1 and first.unique().numel() > 1)
