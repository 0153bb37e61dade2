"""reslice: rows of a sequence that are taken by an index, a split or a pad are a slice, put back as its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, is_zeros
from autopar.ir.ops.ops import op_name
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, is_getitem, record
from autopar.passes.lengths.sliced_rows import Window, alone_in, lengths_in, window_of
from autopar.passes.masks.rowwise import Known
from autopar.passes.search.intents import context_axes

aten = torch.ops.aten
MADE_BY = "reslice"


def reslice(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp or slices split the sequence, most of its rows have one spelling: a slice.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,4,8] = batch "0"
        %w: f32[8] = parameter "w"
        %mul: f32[2,4,8] = aten.mul.Tensor(%x, %w)
        %rows: i64[3] = aten.arange.default(3)
        %index: f32[2,3,8] = aten.index.Tensor(%mul, [None, %rows])
        return value "y" = %index
    becomes
        CAPTURED program
        %x: f32[2,4,8] = batch "0"
        %w: f32[8] = parameter "w"
        %mul: f32[2,4,8] = aten.mul.Tensor(%x, %w)
        %taken: f32[2,3,8] = aten.slice.Tensor(%mul, 1, 0, 3)
        return value "y" = %taken

    So are a part of a split, a pad by less than nothing, and rows one by one that are joined again. In the backward pass
    rows that are added to zeros, or joined with them, are what the gradient of a slice is. `unslice` then asks what hangs
    on the slice, whatever the model's spelling was. It is done for the lengths that are at stake there: parts of a
    weight keep a split that slices of it would not have.
    """  # noqa: E501
    size = math.prod(size for _, size in context_axes(plan.layout_mesh))
    if size == 1:
        return program
    # Only rows that cp or slices would otherwise gather are worth another spelling; all else stays as it is written.
    known, alone = Known(), alone_in(program)
    lengths = lengths_in(program, alone)
    instead: dict[fx.Node, tuple[Any, ...]] = {}
    for node in program.calls():
        is_slice = node.target in (aten.slice.Tensor, aten.slice_backward.default)
        if is_slice or node in alone or not record(node).is_tensor:
            continue
        if record(node).is_backward:
            rows, shape = _put_back(node, known), list(record(node).type.shape)
            if rows is not None and Window(rows.start, rows.count, shape[rows.dim]).is_at_stake(size, lengths):
                instead[node] = (aten.slice_backward.default, rows.x, shape, rows.dim, rows.start, rows.stop, 1)
        else:
            rows = _rows_of(node, known)
            if rows is not None and rows.window.is_at_stake(size, lengths):
                instead[node] = (aten.slice.Tensor, rows.x, rows.dim, rows.start, rows.stop)
    if not instead:
        return program
    build = Builder(MADE_BY)

    def put(node: fx.Node) -> fx.Node | None:
        if node not in instead:
            return None
        target, *args = instead[node]
        name = "put_back" if record(node).is_backward else "taken"
        return build.call(target, *build.new(tuple(args)), like=record(node), name=name)

    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of x along a dim, from `start` to `stop`; or the places in a longer dim to which all rows of x are put."""

    x: fx.Node
    dim: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def window(self) -> Window:
        """Which rows of x they are."""
        return Window(self.start, self.count, record(self.x).type.shape[self.dim])


# --- rows that are taken


def _rows_of(node: fx.Node, known: Known) -> Rows | None:
    """The rows that a call takes; None for one that does something else."""
    args: Any = node.args
    name, moves = op_name(node.target), facts_of(node.target).moves
    if moves == "taken":
        return _indexed(node, known)
    if moves == "joined":
        return _joined([_item(one) if name == "stack" else _rows_of(one, known) for one in args[0]], _dim(node))
    match name:
        case "getitem":
            return _part(*args)
        case "slice":
            window = window_of(node)
            return (
                None if window is None else Rows(args[0], window[0], window[1].start, window[1].start + window[1].short)
            )
        case "constant_pad_nd":
            return _cut(args[0], args[1])
    return None


def _part(split: fx.Node, index: int) -> Rows | None:
    """A part of a split."""
    args: Any = split.args
    if op_name(split.target) not in ("split", "split_with_sizes"):
        return None
    x, sizes, dim = (*args, 0)[:3]
    dim %= len(record(x).type.shape)
    if isinstance(sizes, int):
        return Rows(x, dim, index * sizes, min((index + 1) * sizes, record(x).type.shape[dim]))
    return Rows(x, dim, sum(sizes[:index]), sum(sizes[: index + 1]))


def _indexed(node: fx.Node, known: Known) -> Rows | None:
    """Rows by an index that is a run of numbers."""
    args: Any = node.args
    x, dim, index, *_ = args if isinstance(args[1], int) else (args[0], *_only(args[1]))
    run = None if index is None else _run(index, known, record(x).type.shape, dim)
    return None if run is None else Rows(x, dim % len(record(x).type.shape), *run)


def _only(indices: Sequence[fx.Node | None]) -> tuple[int, fx.Node | None]:
    """The only index among those of the dims, and its dim; None if there are more."""
    found = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return found[0] if len(found) == 1 else (0, None)


def _run(index: fx.Node, known: Known, shape: Sequence[int], dim: int) -> tuple[int, int] | None:
    """The first number of an index along a dim of a tensor of this shape, and the one behind the last, if each is the
    one before it and one. An index of more dims has the same numbers for all rows of the others."""
    type_ = record(index).type
    if type_.dtype not in (torch.int32, torch.int64) or not type_.numel:
        return None
    sizes = [size for i, size in enumerate(shape) if i != dim % len(shape)]
    if len(type_.shape) != 1 and [size for i, size in enumerate(type_.shape) if i != dim % len(shape)] != sizes:
        return None
    value = known.value(index)
    if value is None:
        return None
    rows = value if value.ndim == 1 else value.movedim(dim, -1).flatten(0, -2)
    first, count = int(value.flatten()[0]), rows.shape[-1]
    return (
        (first, first + count)
        if first >= 0 and bool((rows == torch.arange(first, first + count, device="cpu")).all())
        else None
    )


def _cut(x: fx.Node, pads: Sequence[int]) -> Rows | None:
    """A pad of one dim by less than nothing."""
    shape = record(x).type.shape
    dims = [i // 2 for i, pad in enumerate(pads) if pad]
    if len(set(dims)) != 1 or max(pads) > 0:
        return None
    dim, (before, after) = len(shape) - 1 - dims[0], pads[2 * dims[0] : 2 * dims[0] + 2]
    return Rows(x, dim, -before, shape[dim] + after)


def _item(node: fx.Node) -> Rows | None:
    """A row without its dim."""
    args: Any = node.args
    if is_getitem(node) and op_name(args[0].target) == "unbind":
        (x, *dims), index = args[0].args, args[1]
        dim = dims[0] if dims else 0
    elif op_name(node.target) == "select":
        x, dim, index = args
    else:
        return None
    shape = record(x).type.shape
    dim %= len(shape)
    return Rows(x, dim, index % shape[dim], index % shape[dim] + 1)


def _joined(parts: Sequence[Rows | None], dim: int) -> Rows | None:
    """Rows behind each other that are joined again."""
    found = [part for part in parts if part is not None]
    if len(found) != len(parts) or len({(part.x, part.dim) for part in found}) != 1 or found[0].dim != dim:
        return None
    if any(one.stop != other.start for one, other in pairwise(found)):
        return None
    return Rows(found[0].x, dim, found[0].start, found[-1].stop)


# --- rows that are put back


def _put_back(node: fx.Node, known: Known) -> Rows | None:
    """What a call puts into zeros, and where: by an index, or joined with them."""
    args: Any = node.args
    if facts_of(node.target).moves == "added" and isinstance(args[1], int):
        return _put(args[3], args[1], args[2], known) if _is_zero(args[0]) and not node.kwargs else None
    match op_name(node.target):
        case "index_put" if len(args) > 3 and args[3] and _is_zero(args[0]):
            dim, index = _only(args[1])
            return _put(args[2], dim, index, known)
        case "embedding_backward" if args[3] < 0:
            return _put(args[0], 0, args[1], known)
        case "cat":
            return _among_zeros(args[0], _dim(node), [record(one).type.shape[_dim(node)] for one in args[0]], known)
        case "stack":
            return _among_zeros(args[0], _dim(node), [1] * len(args[0]), known)
    return None


def _put(x: fx.Node, dim: int, index: fx.Node | None, known: Known) -> Rows | None:
    run = None if index is None else _run(index, known, record(x).type.shape, dim)
    return None if run is None else Rows(x, dim % len(record(x).type.shape), *run)


def _among_zeros(parts: Sequence[fx.Node], dim: int, sizes: Sequence[int], known: Known) -> Rows | None:
    """All rows of one value, whole or one by one, with zeros before or behind them."""
    kept = [i for i, part in enumerate(parts) if not _is_zero(part)]
    if not kept or len(kept) == len(parts) or kept != list(range(kept[0], kept[-1] + 1)):
        return None
    start, count = sum(sizes[: kept[0]]), sum(sizes[i] for i in kept)
    if (
        len(kept) == 1
        and len(record(parts[kept[0]]).type.shape) > dim
        and sizes[kept[0]] == record(parts[kept[0]]).type.shape[dim]
    ):
        return Rows(parts[kept[0]], dim, start, start + count)
    rows = _joined([_item(parts[i]) or _rows_of(parts[i], known) for i in kept], dim)
    return None if rows is None or rows.count != rows.window.long else Rows(rows.x, dim, start, start + count)


def _is_zero(node: fx.Node) -> bool:
    while facts_of(node.target).moves in ("flat", "turned", "repeated"):
        node = node.args[0]  # type: ignore[assignment]
    return is_zeros(node)


def _dim(node: fx.Node) -> int:
    """The dim along which a call joins."""
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % len(record(node).type.shape)
