"""In which order the axes of a mesh number the ranks: the last ones lie inside a node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.mesh import CONTEXT, CONTEXT_AXES, PIPELINE, SHARDED, ULYSSES
from autopar.ir.ops.measure import inside_of

ORDER = (PIPELINE, "dp", SHARDED, CONTEXT, ULYSSES, "tp")  # outermost first, as a person would write it


def orders(sizes: Mapping[str, int], node: int, asked: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The orders of the axes, outermost first, of which no two have the same groups in the nodes. sizes: of each axis
    of `ORDER`. node: devices of one. asked: axes that must stand in this order, where they have ranks.

    Of those that are alike it is the one nearest to `ORDER`. Nothing lies between cp and ulysses where the latter is
    not asked for, so that both are as one axis for all others.
    """
    wide = tuple(axis for axis in ORDER if sizes[axis] > 1)
    alone = tuple(axis for axis in ORDER if sizes[axis] == 1)
    whole = math.prod(sizes[axis] for axis in wide)
    after = {axis: {*asked[asked.index(axis) + 1 :]} if axis in asked else set() for axis in wide}
    for axis in CONTEXT_AXES:  # a piece of a sequence may be split further, and not the other way
        after.setdefault(axis, set()).add("tp")
    after[CONTEXT].add(ULYSSES)
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for inner in _from_inside(wide, sizes, node if whole > node else 0, after):
        if {CONTEXT, ULYSSES} <= {*wide} - {*asked} and inner.index(ULYSSES) + 1 != inner.index(CONTEXT):
            continue
        found.setdefault(_levels(inner, sizes, node), (*alone, *reversed(inner)))
    return list(found.values())


def _from_inside(
    left: tuple[str, ...], sizes: Mapping[str, int], room: int, after: Mapping[str, set[str]]
) -> Iterator[tuple[str, ...]]:
    """The orders of what is left, innermost first. room: devices of a node that the axes inside of these leave: where
    it is one, no order differs from another."""
    if not left:
        yield ()
        return
    allowed = [axis for axis in reversed(left) if after[axis].isdisjoint(left)]
    for axis in allowed if room > 1 else allowed[:1]:
        rest = tuple(other for other in left if other != axis)
        for outer in _from_inside(rest, sizes, room // sizes[axis], after):
            yield axis, *outer


def _levels(inner: Sequence[str], sizes: Mapping[str, int], node: int) -> tuple[int, ...]:
    """How many ranks of each axis lie in one node; of a pipeline, whose neighbours speak with each other, whether all
    of them do."""
    inside = inside_of({axis: sizes[axis] for axis in reversed(inner)}, node)
    return tuple(inside.get(axis, 1) if axis != PIPELINE else inside.get(axis, 1) == sizes[axis] for axis in ORDER)
