"""shifts: a sequence moved by some rows, of which the first or the last fall out, is one op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_zeros
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, of_parameters, operand_nodes, record
from autopar.passes.lengths.sliced_rows import Window, pad_of, window_of
from autopar.passes.search.intents import context_axes

aten = torch.ops.aten
Shift = tuple[fx.Node, int, int]  # what is moved, its dim, and by how many rows
Roll = tuple[fx.Node, list[tuple[int, int]]]  # what is moved around, and along which dims by how many rows


def shifts(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp splits a sequence, what is moved along it says so.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,8,3] = batch "0"
        %full: f32[2,1,3] = aten.full.default([2, 1, 3], 0, dtype=f32)
        %slice_1: f32[2,7,3] = aten.slice.Tensor(%x, 1, 0, -1)
        %cat: f32[2,8,3] = aten.cat.default([%full, %slice_1], 1)
        return value "y" = %cat
    becomes
        CAPTURED program
        %x: f32[2,8,3] = batch "0"
        %pad_rows: f32[2,8,3] = autopar.pad_rows.default(%x, 1, 1, -1)
        return value "y" = %pad_rows

    The 7 rows of the slice share no split with the 8 of its source; of the shift each rank needs one row of the rank
    before it. Written with a pad, with a slice behind zeros, or as the gradient of either (token shifts: arXiv
    2305.13048, section 3). So is `roll`, by which the rows that fall out come in at the other end; what it moves of the
    batch alone stays: the batch is there whole.
    """
    size = math.prod(size for _, size in context_axes(plan.mesh))
    build, fed = Builder("shifts"), of_parameters(program)

    def put(node: fx.Node) -> fx.Node | None:
        rolled = _roll(node)
        if rolled is not None:
            is_cut = any(record(node).type.shape[dim] % size == 0 for dim, _ in rolled[1])
            return _rolled(build, node, *rolled) if is_cut and node in fed else None
        shift = _shift(node)
        if shift is None or record(node).type.shape[shift[1]] % size:
            return None
        x, dim, by = shift
        return build.call(op("pad_rows"), build.value[x], dim, by, -by, like=record(node), name="pad_rows")

    if size == 1 or not any(_shift(node) or _roll(node) for node in program.calls()):
        return program
    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made


def _roll(node: fx.Node) -> Roll | None:
    """What a roll moves, and each dim by less than half of its rows."""
    if node.target is not aten.roll.default:
        return None
    shape = record(node).type.shape
    rows, dims = ([int(one) for one in arg] for arg in (node.args[1], node.args[2] if len(node.args) > 2 else ()))  # type: ignore[union-attr,arg-type]
    if len(rows) != len(dims) or not dims:  # of all elements, as one dim
        return None
    moves = [(dim % len(shape), by) for dim, by in zip(dims, rows, strict=True)]
    return operand_nodes(node)[0], [(dim, _shorter(by, shape[dim])) for dim, by in moves if by % max(1, shape[dim])]


def _shorter(by: int, rows: int) -> int:
    """The way around that moves fewer rows."""
    return (by + rows // 2) % rows - rows // 2


def _rolled(build: Builder, node: fx.Node, x: fx.Node, moves: list[tuple[int, int]]) -> fx.Node:
    rolled = build.value[x]
    for dim, by in moves:
        rolled = build.call(op("pad_rows"), rolled, dim, by, -by, like=record(node), name="pad_rows", wrap=True)
    return rolled


def _shift(node: fx.Node) -> Shift | None:
    """What a node moves, if that is all it does."""
    if node.target is aten.cat.default:
        return _of_cat(node)
    if node.target is aten.constant_pad_nd.default:
        return None if any(node.args[2:]) else _of_pad(node) or _of_slice(node)
    return _of_slice(node) if node.target is aten.slice_backward.default else None


def _of_pad(node: fx.Node) -> Shift | None:
    """Zeros at one end of one dim, and as many rows less at the other."""
    pads: Any = node.args[1]
    pairs = [(i, pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if len(pairs) != 1 or pairs[0][1] != -pairs[0][2]:
        return None
    (x,) = operand_nodes(node)
    return x, len(record(x).type.shape) - 1 - pairs[0][0], pairs[0][1]


def _of_slice(node: fx.Node) -> Shift | None:
    """A slice of rows among zeros: at the other end of as many."""
    padded, (inside,) = pad_of(node), operand_nodes(node)
    cut = window_of(inside) or _crop_of(inside)
    if padded is None or cut is None or padded[0] != cut[0] or padded[1].long != cut[1].long:
        return None
    by = padded[1].start - cut[1].start
    return (operand_nodes(inside)[0], cut[0], by) if by and cut[1].short == cut[1].long - abs(by) else None


def _crop_of(node: fx.Node) -> tuple[int, Window] | None:
    """The window of a pad by fewer rows than none (see `window_of`)."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    pads: Any = node.args[1]
    long, short = record(operand_nodes(node)[0]).type.shape, record(node).type.shape
    dims = [at for at in range(len(long)) if long[at] != short[at]]
    if len(dims) != 1 or max(pads) > 0:
        return None
    (dim,) = dims
    return dim, Window(-pads[2 * (len(long) - 1 - dim)], short[dim], long[dim])


def _of_cat(node: fx.Node) -> Shift | None:
    """Zeros before a slice of rows, or behind it."""
    parts = operand_nodes(node)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or record(parts[0]).type.dtype != record(parts[1]).type.dtype:
        return None
    dim %= len(record(node).type.shape)
    for zeros, rows, sign in ((parts[0], parts[1], 1), (parts[1], parts[0], -1)):
        by, cut = record(zeros).type.shape[dim], window_of(rows)
        if not is_zeros(zeros) or cut is None or cut[0] != dim or cut[1].short != cut[1].long - by:
            continue
        if cut[1].start == (0 if sign > 0 else by) and cut[1].short:
            return operand_nodes(rows)[0], dim, sign * by
    return None
