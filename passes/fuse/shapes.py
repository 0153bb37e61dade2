"""Where the elements of a value lie in rows, and which views and calls leave them in their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.ir.ops.op_facts import argument_of, argument_place
from autopar.ir.program import is_getitem
from autopar.passes.fuse.facts import ViewedRead, aten


def views_between(read: ViewedRead) -> Iterator[fx.Node]:
    """The views through which a value is read."""
    node = read.seen
    while node is not read.value:
        yield node
        node = node.args[0]  # type: ignore[assignment]


def source_of(view: fx.Node) -> fx.Node:
    """What a view shows; of a part of a split what was split."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source.args[0] if is_getitem(view) else source  # type: ignore[return-value]


def first_moved(node: fx.Node, rank: int) -> int:
    """The first dim along which a call moves elements."""
    pads = argument_of(node, "pad")
    if pads is not None:
        return rank - len(pads) // 2
    dims = argument_of(node, "dims" if argument_place(node.target, "dims") else "dim")
    return min((dim % rank for dim in ([dims] if isinstance(dims, int) else dims or ())), default=0)


def ends_in(shape: tuple[int, ...], width: int) -> bool:
    """True if a row of `width` elements is some whole last dims."""
    return width in (math.prod(shape[place:]) for place in range(len(shape)))


def leading(shape: tuple[int, ...]) -> list[int]:
    """The sizes of the leading dims together."""
    return [math.prod(shape[:place]) for place in range(len(shape) + 1)]


def is_vector(shape: tuple[int, ...], width: int) -> bool:
    """True for the elements of a row, the same for all rows."""
    return all(size == 1 or math.prod(shape[place:]) <= width for place, size in enumerate(shape))


def rows_align(seen: tuple[int, ...], shape: tuple[int, ...], rows: int) -> bool:
    """True if, broadcast to `shape`, each row reads what belongs to it: all leading dims are there."""
    aligned = (1,) * (len(shape) - len(seen)) + seen
    places = range(len(shape) + 1)
    return any(math.prod(shape[:place]) == rows and aligned[:place] == shape[:place] for place in places)


def moves_ones_only(view: fx.Node, shape: tuple[int, ...]) -> bool:
    """True for a permutation that leaves all dims but those of size 1 in order."""
    order = _order(view, len(shape))
    kept = [dim for dim in order if shape[dim] != 1]
    return kept == sorted(kept)


def _order(view: fx.Node, rank: int) -> list[int]:
    args: Any = view.args
    if view.target is aten.permute.default:
        return [dim % rank for dim in args[1]]
    order = list(range(rank))
    a, b = (0, -1) if view.target is aten.t.default else args[1:3]
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order
