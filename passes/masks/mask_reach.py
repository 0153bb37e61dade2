"""How far back a query looks through a mask that is a condition."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.comparisons import All, Comparison, Condition
from autopar.passes.masks.mask_values import Vector
from autopar.passes.masks.rowwise import Known

Span = tuple[int | None, int | None]  # at most so many keys before the query's own position, and behind it


def reach_of(
    condition: Condition, vectors: Mapping[str, Vector], causal: bool, length: int, known: Known
) -> int | None:
    """How many keys before its own position a query sees at most, if it sees none after it. None if that hangs on the
    batch, or is no less than all."""
    parts = condition.parts if isinstance(condition, All) else (condition,)
    spans = [_span(part, vectors, length, known) for part in parts if isinstance(part, Comparison)]
    back = min((before for before, _ in spans if before is not None), default=length)
    ahead = min((behind for _, behind in spans if behind is not None), default=0 if causal else length)
    return max(0, back) if (causal or ahead <= 0) and back < length - 1 else None


def _span(one: Comparison, vectors: Mapping[str, Vector], length: int, known: Known) -> Span:
    """Find the columns of which a comparison holds: where they do not fall, from one on, up to one, or between two."""
    columns, rows = (_elements(vectors[name], length, known) for name in (one.column, one.row))
    if columns is None or rows is None or not length or bool((columns.diff() < 0).any()):
        return None, None
    place = torch.arange(length, device="cpu")
    before = behind = None
    if one.sign in (">", ">=", "=="):
        before = int((place - torch.searchsorted(columns, rows, right=one.sign == ">")).max())
    if one.sign in ("<", "<=", "=="):
        behind = int((torch.searchsorted(columns, rows, right=one.sign != "<") - 1 - place).max())
    return before, behind


def _elements(vector: Vector, length: int, known: Known) -> torch.Tensor | None:
    """Compute a vector of integers that hangs on no input and is the same for all samples and heads."""
    if vector.node is None:
        return torch.arange(length, device="cpu") + vector.shift
    value = known.value(vector.node)
    if value is None or value.numel() != length or value.dtype.is_floating_point or max(value.shape) != length:
        return None
    return value.flatten() + vector.shift
