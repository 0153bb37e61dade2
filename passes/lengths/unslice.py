"""unslice: a slice of a sequence becomes the whole sequence, of which the dropped rows weigh nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ir.plan import Plan
from autopar.ir.program import (
    Builder,
    Program,
    Record,
    erase_unused,
    is_getitem,
    operand_nodes,
    record,
    set_record,
    source_of,
)
from autopar.passes.lengths.sliced_rows import SlicedRows, alone_in, lengths_in, window_of
from autopar.passes.rules import table_of
from autopar.passes.rules.follow import readers
from autopar.passes.rules.splits import Split
from autopar.passes.search.intents import context_axes

aten = torch.ops.aten
MADE_BY = "unslice"


def unslice(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp or slices split the sequence, rows that a slice drops are kept, and weigh nothing.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,4,8] = batch "0"
        %w: f32[8] = parameter "w"
        %y: f32[2,4] = batch "1"
        %einsum: f32[2,4] = autopar.einsum.default(%x, %w, "bsd,d->bs")
        %slice_1: f32[2,3] = aten.slice.Tensor(%einsum, 1, 0, -1)
        %slice_2: f32[2,3] = aten.slice.Tensor(%y, 1, 1, 4)
        %sub: f32[2,3] = aten.sub.Tensor(%slice_1, %slice_2)
        %abs_1: f32[2,3] = aten.abs.default(%sub)
        %sum_1: f32[] = aten.sum.default(%abs_1)
        return loss "loss" = %sum_1
    becomes
        CAPTURED program
        %x: f32[2,4,8] = batch "0"
        %w: f32[8] = parameter "w"
        %y: f32[2,4] = batch "1"
        %einsum: f32[2,4] = autopar.einsum.default(%x, %w, "bsd,d->bs")
        %slice_2: f32[2,3] = aten.slice.Tensor(%y, 1, 1, 4)
        %padded: f32[2,4] = aten.constant_pad_nd.default(%slice_2, [0, 1], 0.0)
        %sub: f32[2,4] = aten.sub.Tensor(%einsum, %padded)
        %abs_1: f32[2,4] = aten.abs.default(%sub)
        %row: i64[4] = aten.arange.default(4)
        %kept: b8[4] = aten.lt.Scalar(%row, 3)
        %rows: b8[1,4] = aten.reshape.default(%kept, [1, 4])
        %zero: f32[] = aten.full.default([], 0, dtype=f32)
        %chosen: f32[2,4] = aten.where.self(%rows, %abs_1, %zero)
        %sum_1: f32[] = aten.sum.default(%chosen)
        return loss "loss" = %sum_1

    The 3 rows of a slice and the 4 of its source share no split, so that the source would be gathered. It is done if
    the table of rules proves that nobody sees the dropped rows: all that hangs on the slice takes the rows one by one
    (their dim may be split at any place), sums over them, or puts them back, as the slice's gradient does. In a sum
    they are zero: selected, never multiplied, so that no inf or NaN of theirs is seen. Labels are padded with what the
    loss ignores, which makes zeros of what follows. Where it is not so the program stays as it is.
    """
    axes = context_axes(plan.layout_mesh)
    size = math.prod(size for _, size in axes)
    kept: dict[str, str] = {}  # slices that stay, with a note
    while size > 1:
        found = _next(program, plan, size, kept)
        if found is None:
            break
        program = _Unslice(found).run(program)
    notes = [f"axis '{':'.join(axis for axis, _ in axes)}': {note}" for note in kept.values() if note]
    return program.with_(notes=(*program.notes, *dict.fromkeys(notes))) if notes else program


def _next(program: Program, plan: Plan, size: int, kept: dict[str, str]) -> SlicedRows | None:
    """The first slice of a sequence of the batch that need not be, if the axis divides what it is cut out of."""
    alone = alone_in(program)
    lengths = lengths_in(program, alone)
    for node in program.calls():
        found = window_of(node)
        if found is None or node in alone or node.name in kept:
            continue
        dim, window = found
        kept[node.name] = ""
        if window.is_at_stake(size, lengths):
            rows = SlicedRows(node, dim, window, table_of(plan), alone)
            if rows.is_unseen():
                return rows
            if record(node).made_by == MADE_BY:
                continue
            what = f"{record(node).source} takes {window.short} of {window.long} rows of a sequence"
            kept[node.name] = f"{what}, which are gathered, since the whole cannot stand for them ({rows.why_not()})"
    return None


class _Unslice:
    """Writes a program in which the values of one slice have the whole length."""

    def __init__(self, rows: SlicedRows) -> None:
        self.rows, self.window = rows, rows.window
        self.build = Builder(MADE_BY)
        self.long: dict[fx.Node, fx.Node] = {}  # the long value of each
        self.masks: dict[tuple[tuple[int, ...], str], fx.Node] = {}
        self.zeroed: dict[fx.Node, fx.Node] = {}
        self.short: set[fx.Node] = set()  # the calls that are computed at the length of the slice, too

    def run(self, program: Program) -> Program:
        self.short = self._read_short()
        made = self.build.rewrite(program, self._put)
        erase_unused(made.graph)
        return made

    def _read_short(self) -> set[fx.Node]:
        """The calls made long of which somebody reads what they are without: their result, or their operands'."""
        short: set[fx.Node] = set()
        for node in reversed(self.rows.slice.graph.nodes):
            values = [value for value in self.rows.places if value[0] is node]
            is_read = any(
                self.rows.is_short_too(value) or any(user in short for user in readers(value)) for value in values
            )
            if node in self.rows.calls and node in self.rows.alone and is_read:
                short.add(node)
        return short

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function":
            return None
        if self.rows.is_whole(node):
            self.long[node] = self.build.value[operand_nodes(node)[0]]
            return self.long[node]
        if self.rows.is_end(node):
            return self._end(node)
        if source_of(node)[0] not in self.rows.calls:
            return None
        if source_of(node)[0] in self.short:
            self.build.copy(node)
        if is_getitem(node):
            return self._item(node)
        return self._call(node)

    def _end(self, node: fx.Node) -> fx.Node:
        """The rows back in the whole: zeros, or what a pad says, where the slice has none."""
        fill = node.args[2] if node.target is aten.constant_pad_nd.default and len(node.args) > 2 else 0
        source = operand_nodes(node)[0]
        filled = self._filled(source, fill, record(node), name=node.name)
        if filled is not self.long[source]:
            set_record(filled, record(node).with_(made_by=MADE_BY))
        return filled

    def _call(self, node: fx.Node) -> fx.Node:
        """A call on long operands."""
        known = record(node)
        zeroed = self.rows.must_be_zero(node)
        operands = {
            operand: self._zeroed(operand, known) if i in zeroed else self._long(operand, known)
            for i, operand in enumerate(operand_nodes(node))
        }
        args, kwargs = fx.node.map_arg(self.rows.arguments(node), operands.__getitem__)
        types = self.rows.types(node)
        like = known if types == known.types else known.with_(types=types, origin="")
        made = self.build.call(node.target, *args, like=like, name=node.name, **kwargs)  # type: ignore[arg-type]
        return self._is_long(node, made)

    def _item(self, node: fx.Node) -> fx.Node:
        producer, index = node.args
        type_ = self.rows.type_of(node)
        like = record(node) if type_ == record(node).type else record(node).with_(types=(type_,), origin="")
        made = self.build.call(node.target, self.long[producer], index, like=like, name=node.name)  # type: ignore[index, arg-type]
        return self._is_long(node, made)

    def _is_long(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """Note the long value of a node. Gives what stands for the short one."""
        self.long[node] = made
        if source_of(node)[0] in self.short:
            return self.build.value[node]
        is_read = not record(node).several and self.rows.at(node) and self.rows.is_short_too(source_of(node))
        return self._cut(node, made) if is_read else made

    # --- values of either length

    def _long(self, node: fx.Node, user: Record) -> fx.Node:
        if self.rows.at(node) is None:
            return self.build.value[node]
        if node not in self.long:
            self.long[node] = self._pad(node, user)
        return self.long[node]

    def _pad(self, node: fx.Node, user: Record) -> fx.Node:
        """A short value with rows before and after it."""
        at, window = self.rows.at(node), self.window
        assert at is not None
        dim, (before, after) = at[0], (window.start, window.long - window.short - window.start)
        value, shape = self.build.value[node], record(node).type.shape
        apart, long = _apart(shape, at, window.short), self.rows.type_of(node).shape
        like = record(node).with_(phase=user.phase)
        value = self._reshaped(value, apart, like)
        behind = len(apart) - 2 - dim if apart != shape else len(shape) - 1 - dim
        pads = [*[0] * 2 * behind, before, after]
        fill = self.rows.rest[source_of(node)]
        made = self.build.infer(aten.constant_pad_nd.default, value, pads, fill, like=like, name="padded")
        return self._reshaped(made, long, like)

    def _cut(self, node: fx.Node, long: fx.Node) -> fx.Node:
        """The rows of the slice out of a long value."""
        at, window, known = self.rows.at(node), self.window, record(node)
        assert at is not None
        shape, dim = self.rows.type_of(node).shape, at[0]
        apart = _apart(shape, at, window.long)
        value = self._reshaped(long, apart, known)
        place, ends = dim + (apart != shape), (window.start, window.start + window.short)
        made = self.build.infer(aten.slice.Tensor, value, place, *ends, like=known, name="cut")
        return self._reshaped(made, known.type.shape, known)

    def _zeroed(self, node: fx.Node, user: Record) -> fx.Node:
        """A long value with zeros in the dropped rows."""
        if node not in self.zeroed:
            self.zeroed[node] = self._filled(node, 0, user)
        return self.zeroed[node]

    def _filled(self, node: fx.Node, fill: Any, user: Record, name: str = "chosen") -> fx.Node:
        """A long value with a number in the dropped rows."""
        long = self._long(node, user)
        if self.rows.number(node) == fill:
            return long
        type_, at = self.rows.type_of(node), self.rows.at(node)
        assert at is not None
        mask = self._mask(type_.shape, at, user)
        number = self.build.infer(aten.full.default, [], fill, dtype=type_.dtype, like=user, name="zero")
        return self.build.infer(aten.where.self, mask, long, number, like=user, name=name)

    def _mask(self, shape: tuple[int, ...], at: Split, like: Record) -> fx.Node:
        """True where a long value of this shape has rows of the slice, to be broadcast to it."""
        (dim, outer), window = at, self.window
        inner = shape[dim] // outer // window.long
        wanted = tuple(size if i == dim else 1 for i, size in enumerate(shape))
        key = (*wanted, outer), like.phase
        if key in self.masks:
            return self.masks[key]
        mask = self._rows(like)
        if shape[dim] != window.long:
            mask = self._reshaped(mask, (1, window.long, 1), like)
            mask = self.build.infer(aten.expand.default, mask, [outer, window.long, inner], like=like, name="rows")
        self.masks[key] = self._reshaped(mask, wanted, like)
        return self.masks[key]

    def _rows(self, like: Record) -> fx.Node:
        """True for each row of the slice."""
        window = self.window
        row = self.build.infer(aten.arange.default, window.long, like=like, name="row")
        end = window.start + window.short
        found = []
        if window.start:
            found.append(self.build.infer(aten.ge.Scalar, row, window.start, like=like, name="kept"))
        if end < window.long:
            found.append(self.build.infer(aten.lt.Scalar, row, end, like=like, name="kept"))
        both = aten.logical_and.default
        return found[0] if len(found) == 1 else self.build.infer(both, *found, like=like, name="kept")

    def _reshaped(self, value: fx.Node, shape: tuple[int, ...], like: Record) -> fx.Node:
        if record(value).type.shape == shape:
            return value
        return self.build.infer(aten.reshape.default, value, list(shape), like=like, name="rows")


def _apart(shape: tuple[int, ...], at: Split, rows: int) -> tuple[int, ...]:
    """A shape with the dim of the rows taken apart into what is outside of them, the rows, and what is inside."""
    dim, outer = at
    inner = shape[dim] // outer // rows
    return shape if outer == inner == 1 else (*shape[:dim], outer, rows, inner, *shape[dim + 1 :])
