"""Which query sees which key by a mask: a condition on vectors, if all of the mask is known to come of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.ir.comparisons import (
    FALSE,
    HIDING,
    SIGNS,
    TRUE,
    All,
    BoolVector,
    Comparison,
    Condition,
    Some,
    every,
    holds,
    names_in,
    renamed,
    some,
)
from autopar.ir.program import record
from autopar.passes.masks.mask_reach import reach_of
from autopar.passes.masks.mask_values import Cases, MaskValues, Vector
from autopar.passes.masks.mask_views import axes_of, under
from autopar.passes.masks.rowwise import Known

MOST = 16  # vectors of a condition


@dataclass(frozen=True, slots=True)
class MaskCondition:
    """`condition` speaks of rows r0, r1, ... and columns c0, c1, ...; `causal`: nothing after the own position. reach:
    see `reach_of`."""

    condition: Condition
    rows: tuple[Vector, ...]
    columns: tuple[Vector, ...]
    causal: bool
    reach: int | None = None


def condition_of(mask: fx.Node, sizes: Mapping[str, int], causal: bool, known: Known) -> MaskCondition | None:
    """What stands for the mask of an attention of these sizes (b, h, s, t); None if it stays a tensor."""
    shape = record(mask).type.shape
    letters = ("b", "h", "s", "t")[4 - len(shape) :]
    if not (causal or {"s", "t"} <= axes_of(shape, letters)):
        return None  # the tensor is a vector itself
    values = MaskValues(sizes, known)
    found = values.of(mask, letters)
    if not isinstance(found, Cases):
        return None
    vectors = values.vectors()
    condition = found.where(True) if record(mask).type.dtype == torch.bool else _seen(found, values)
    if condition is None or condition == FALSE or len(names_in(condition)) > MOST:
        return None
    reach = None
    if sizes["s"] == sizes["t"]:
        reach = reach_of(condition, vectors, causal, sizes["s"], known)
        condition, causal = (condition, causal) if causal else _without_causal(condition, vectors, known)
    return replace(_in_order(condition, vectors, causal), reach=reach)


def _seen(cases: Cases, values: MaskValues) -> Condition | None:
    """Where a mask that is added is zero, if it hides all else."""
    condition = cases.where(0)
    hiding = [number for number, _ in cases.of if number != 0]
    if any(number > HIDING for number in hiding):
        return None
    is_exact = all(number == -torch.inf for number in hiding) or _sees_itself(condition, values)
    return condition if is_exact else None


def _sees_itself(condition: Condition, values: MaskValues) -> bool:
    """True if it is certain that each query sees the key of its own position, which more queries than keys do not have.
    What is not known counts as false, which makes a condition, whose parts are never denied, false more often."""
    vectors, sizes = values.vectors(), values.sizes
    if sizes["s"] > sizes["t"]:
        return False
    known = {name: one for name, vector in vectors.items() if (one := _elements(vector, values)) is not None}
    found = holds(_certain(condition, vectors, frozenset(known), sizes), known)
    return found is None or bool(found.all())


def _elements(vector: Vector, values: MaskValues) -> torch.Tensor | None:
    """The elements of a vector at the positions of queries, if they are of positions alone and hang on no input."""
    if vector.node is None or not axes_of(record(vector.node).type.shape, vector.letters) <= {"s", "t"}:
        return None
    found = values.known.value(vector.node)
    if found is None:
        return None
    found = found.flatten()[: values.sizes["s"]]
    return found + vector.shift if vector.shift else found  # a sum with bools is no bool


def _certain(
    condition: Condition, vectors: Mapping[str, Vector], known: frozenset[str], sizes: Mapping[str, int]
) -> Condition:
    """The condition, at equal positions, without what is not known of it."""
    match condition:
        case Comparison(column, sign, row):
            if _base(vectors[column], sizes) == _base(vectors[row], sizes):
                return TRUE if SIGNS[sign](vectors[column].shift, vectors[row].shift) else FALSE
            return condition if {column, row} <= known else FALSE
        case BoolVector(name):
            return condition if name in known else FALSE
        case All(parts):
            return every(*(_certain(part, vectors, known, sizes) for part in parts))
        case Some(parts):
            return some(*(_certain(part, vectors, known, sizes) for part in parts))


def _base(vector: Vector, sizes: Mapping[str, int]) -> tuple[fx.Node | None, tuple[str, ...]]:
    """The tensor that a vector is a view of, and what its dims are: both queries and keys are positions."""
    node, letters = vector.node, vector.letters
    while node is not None and node.op == "call_function" and (below := under(node, letters, sizes)) is not None:
        node, letters = below
    shape = (0,) * len(letters) if node is None else record(node).type.shape
    kept = (letter if size != 1 else "" for size, letter in zip(shape, letters, strict=True))
    return node, tuple(letter.replace("t", "s") for letter in kept)


def _without_causal(condition: Condition, vectors: Mapping[str, Vector], known: Known) -> tuple[Condition, bool]:
    """A condition without `position of the key <= position of the query`, if that was a part of it and nothing else in
    it compares what hangs on no input: a window as well as the causal part makes the work of all queries alike."""
    parts = condition.parts if isinstance(condition, All) else (condition,)
    rest = [part for part in parts if not _is_causal(part, vectors)]
    fixed = {name for name, one in vectors.items() if one.node is None or known.value(one.node) is not None}
    is_other = any({one.column, one.row} <= fixed for part in rest for one in _comparisons(part))
    return (condition, False) if len(rest) == len(parts) or is_other else (every(*rest), True)


def _is_causal(condition: Condition, vectors: Mapping[str, Vector]) -> bool:
    """True for `key <= query` or `key < query + 1`, of positions."""
    if not isinstance(condition, Comparison) or vectors[condition.column] != Vector(None, ("t",)):
        return False
    return (condition.sign, vectors[condition.row]) in (("<=", Vector(None, ("s",))), ("<", Vector(None, ("s",), 1)))


def _comparisons(condition: Condition) -> Iterator[Comparison]:
    if isinstance(condition, Comparison):
        yield condition
    elif isinstance(condition, (All, Some)):
        for part in condition.parts:
            yield from _comparisons(part)


def _in_order(condition: Condition, vectors: Mapping[str, Vector], causal: bool) -> MaskCondition:
    """With rows and columns numbered as the condition names them."""
    used = names_in(condition)
    rows, columns = ([name for name in used if name[0] == side] for side in "rc")
    names = {name: f"{name[0]}{i}" for side in (rows, columns) for i, name in enumerate(side)}
    of_rows, of_columns = (tuple(vectors[name] for name in side) for side in (rows, columns))
    return MaskCondition(renamed(condition, names), of_rows, of_columns, causal)
