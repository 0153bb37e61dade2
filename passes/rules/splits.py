"""Where a dim of a tensor is among the names of a rule: a split of the one is a choice of the other."""

from __future__ import annotations

import math

from autopar.ir.layout import OWNED
from autopar.passes.rules.rule import Dims

Split = tuple[int, int]  # (dim, outer); outer OWNED: each row is with its owner
Choice = tuple[str, int]  # (name, outer within the name)


def place(dims: Dims, choice: Choice, sizes: dict[str, int]) -> Split | None:
    """Where a tensor with these names is split by a choice; None if it lacks the name."""
    name, outer = choice
    for dim, names in enumerate(dims):
        if name in names:
            before = math.prod(sizes[n] for n in names[: names.index(name)])
            return dim, before * outer
    return None


def choice_at(dims: Dims, split: Split, sizes: dict[str, int]) -> Choice | None:
    """The choice that splits a tensor with these names at (dim, outer): the inverse of `place`."""
    dim, outer = split
    if outer == OWNED:
        return (dims[dim][0], OWNED) if len(dims[dim]) == 1 else None
    before = 1
    for name in dims[dim]:
        if abs(outer) % before:
            return None
        inner = abs(outer) // before
        if (inner == 1 and outer > 0) or (1 < inner < sizes[name] and sizes[name] % inner == 0):
            return None if outer < 0 and inner % 2 else (name, inner if outer > 0 else -inner)
        before *= sizes[name]
    return None
