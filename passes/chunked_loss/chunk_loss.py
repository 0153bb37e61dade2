"""chunk_loss: the logits of a vocabulary are computed, used and forgotten some tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.layout import Factor, Layout
from autopar.ir.ops.measure import local_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import (
    Builder,
    Program,
    Record,
    TensorType,
    is_gathered_input,
    operand_nodes,
    record,
    set_record,
)
from autopar.passes.chunked_loss.head_region import READS, Region, Taken, regions
from autopar.passes.rules.splits import Split
from autopar.passes.rules.states import State

aten = torch.ops.aten
MADE_BY = "chunk_loss"
LEAST, MOST = 8, 64  # chunks, where no bytes are asked for
CHUNK_BYTES = 2**26  # of the logits of one
AUTO_BYTES = 2**28  # of logits that "auto" leaves whole


def chunk_loss(program: Program, plan: Plan) -> Program:
    """EXPLICIT -> EXPLICIT. A product whose results only losses read is computed chunk by chunk, gradients included.

        chunked_loss: 64
        EXPLICIT program on tp=2
        %w: f32[16,2] [tp,-] = parameter "w"
        %x: f32[4,2] [-,-] = batch "0"
        %einsum: f32[4,16] [-,tp] = autopar.einsum.default(%x, %w, "ta,va->tv")
        %exp: f32[4,16] [-,tp] = aten.exp.default(%einsum)
        %sum_1: f32[4] [-] partial(tp) = aten.sum.dim_IntList(%exp, [1])
        %all_reduce: f32[4] [-] = autopar.all_reduce.default(%sum_1, "tp", "sum")
        %sum_2: f32[] [] = aten.sum.default(%all_reduce)
        %einsum_1: f32[16,2] [tp,-] = autopar.einsum.default(%exp, %x, "tv,ta->va")   # backward
        return loss "loss" = %sum_2
        return gradient "w" = %einsum_1
    becomes
        EXPLICIT program on tp=2
        %w: f32[16,2] [tp,-] = parameter "w"
        %x: f32[4,2] [-,-] = batch "0"
        %chunk: f32[2,2] [-,-] = aten.slice.Tensor(%x, 0, 0, 2)
        %einsum_chunk0: f32[2,16] [-,tp] = autopar.einsum.default(%chunk, %w, "ta,va->tv")
        %exp_chunk0: f32[2,16] [-,tp] = aten.exp.default(%einsum_chunk0)
        %sum_1_chunk0: f32[2] [-] partial(tp) = aten.sum.dim_IntList(%exp_chunk0, [1])
        %einsum_1_chunk0: f32[16,2] [tp,-] = autopar.einsum.default(%exp_chunk0, %chunk, "tv,ta->va")
        %chunk_1: f32[2,2] [-,-] = aten.slice.Tensor(%x, 0, 2, 4)
        %einsum_chunk1: f32[2,16] [-,tp] = autopar.einsum.default(%chunk_1, %w, "ta,va->tv")
        %exp_chunk1: f32[2,16] [-,tp] = aten.exp.default(%einsum_chunk1)
        %sum_1_chunk1: f32[2] [-] partial(tp) = aten.sum.dim_IntList(%exp_chunk1, [1])
        %einsum_1_chunk1: f32[16,2] [tp,-] = autopar.einsum.default(%exp_chunk1, %chunk_1, "tv,ta->va")
        %total: f32[16,2] [tp,-] = aten.add.Tensor(%einsum_1_chunk0, %einsum_1_chunk1)
        %sum_1_chunks: f32[4] [-] partial(tp) = aten.cat.default([%sum_1_chunk0, %sum_1_chunk1], 0)
        %all_reduce: f32[4] [-] = autopar.all_reduce.default(%sum_1_chunks, "tp", "sum")
        %sum_2: f32[] [] = aten.sum.default(%all_reduce)
        return loss "loss" = %sum_2
        return gradient "w" = %total

    What hangs on the logits token by token (the product, what is done to logits, the loss and its gradient) is made
    for a chunk of the tokens before the next chunk begins, so that of logits, of their gradient and of what lies
    between no more than a chunk exists. The two products of the gradient are made at once, since the gradient of the
    loss of a token does not hang on the other tokens: what does (the count in a mean) is computed from the labels,
    before. The gradient of the weight is summed over the chunks, in at least float32. (Liger-Kernel's fused linear
    cross entropy, arXiv 2410.10989, is a module of its own; here it is found in the program.)
    """
    wanted = plan.options.chunked_loss
    if wanted is False:
        return program
    heads = [node.name for node, found in regions(program, plan) if isinstance(found, Region)]
    for name in heads:  # one after the other: what is cut for one may lie in the way of the next
        region = next((found for node, found in regions(program, plan) if node.name == name), None)
        if isinstance(region, Region) and (count := _count(region, program, plan)) > 1:
            program = _Chunks(program, region, count).run()
    return program if heads or wanted == "auto" else program.with_(notes=(*program.notes, _why(program, plan)))


def _why(program: Program, plan: Plan) -> str:
    """Why nothing was done, by the largest product."""
    reasons = {node: why for node, why in regions(program, plan) if isinstance(why, str)}
    if not reasons:
        return "chunked_loss: no product makes more than twice of what it reads, so there are no logits to cut"
    largest = sorted(reasons, key=lambda node: local_bytes(node, program.mesh), reverse=True)
    head = next((node for node in largest if not reasons[node].endswith(READS)), largest[0])
    known = record(head)
    return f"chunked_loss: %{head.name} of {known.module} at {known.source} stays whole, since {reasons[head]}"


def _count(region: Region, program: Program, plan: Plan) -> int:
    """The number of chunks: the least divisor of the tokens that makes them small enough. It divides those of slices of
    all lengths that were asked for."""
    wanted, lengths = plan.options.chunked_loss, plan.slice_lengths
    size = max(local_bytes(node, program.mesh) for node in region.large)
    if wanted == "auto" and size < AUTO_BYTES:
        return 1
    least = math.ceil(size / wanted) if not isinstance(wanted, (bool, str)) else max(LEAST, -(-size // CHUNK_BYTES))
    most = region.rest if not isinstance(wanted, (bool, str)) else min(region.rest, MOST)
    divisors = [n for n in range(1, most + 1) if region.rest % n == 0]
    divisors = [
        n for n in divisors if all(region.rest // n * one * len(lengths) % sum(lengths) == 0 for one in lengths)
    ]
    return next((n for n in divisors if n >= least), max(divisors, default=1))


class _Chunks:
    """Puts the chunks of a region in the place of it."""

    def __init__(self, program: Program, region: Region, count: int) -> None:
        self.program, self.region, self.count = program, region, count
        self.build = Builder(MADE_BY)
        self.blocks: dict[tuple[fx.Node, Split], fx.Node] = {}
        self.pieces: dict[tuple[fx.Node, Split], fx.Node] = {}  # of this chunk

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put, later=self.region.members)

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node is self.region.head:
            self._emit()
        return self.build.value.get(node)

    # -- before ------------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        members = list(self.region.members)
        given = dict.fromkeys(o for node in members for o in node.all_input_nodes if o not in self.region.members)
        gathered: dict[object, fx.Node] = {}
        for operand in given:
            twin = gathered.setdefault(_gather(operand) or operand, operand)
            if twin is not operand and all(user in self.region.members for user in operand.users):
                self.build.value[operand] = self.build.value[twin]  # what the backward pass would gather again
            else:
                self._ensure(operand)
        totals: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, list[fx.Node]] = {exit_: [] for exit_ in self.region.exits}
        for i in range(self.count):
            value: dict[fx.Node, fx.Node] = {}
            self.pieces.clear()
            for node in members:
                value[node] = self._member(node, i, value)
                if node in self.region.sums:
                    totals[node] = self._sum(node, totals.get(node), value[node], i)
                elif node in parts:
                    parts[node].append(value[node])
        self.build.value |= totals
        for node, pieces in parts.items():
            if node not in totals:
                self.build.value[node] = self._joined(node, pieces)

    def _ensure(self, node: fx.Node) -> None:
        """What a chunk reads stands before it; it hangs on no logits, so it can."""
        if node in self.build.value:
            return
        for operand in node.all_input_nodes:
            self._ensure(operand)
        made = self.build.copy(node)
        if node.op == "call_function":
            set_record(made, record(made).with_(phase="forward"))

    # -- a chunk -----------------------------------------------------------------------------------------------------

    def _member(self, node: fx.Node, i: int, value: dict[fx.Node, fx.Node]) -> fx.Node:
        taken = self.region.members[node]
        args, kwargs = taken.arguments(self.count)
        places = dict(zip(operand_nodes(node), taken.operands, strict=True))

        def new(old: fx.Node) -> fx.Node:
            if old in value:
                return value[old]
            place = places.get(old)
            return self._piece(old, place, i) if isinstance(place, tuple) else self.build.value[old]

        made = self.build.graph.create_node(
            "call_function", node.target, fx.node.map_arg(args, new), fx.node.map_arg(kwargs, new),
            name=f"{node.name}_chunk{i}",
        )  # fmt: skip
        set_record(made, self._record(node, taken))
        return made

    def _record(self, node: fx.Node, taken: Taken) -> Record:
        known, states = record(node), iter(taken.results)
        places = [None if type_ is None else next(states) for type_ in known.types]
        return known.with_(
            types=tuple(type_ and self._part(type_, place) for type_, place in zip(known.types, places, strict=True)),
            layouts=tuple(lay and self._lay(lay, place) for lay, place in zip(known.layouts, places, strict=True)),
            operands=tuple(self._lay(lay, place) for lay, place in zip(known.operands, taken.operands, strict=True)),
            origin="", phase="forward", made_by=MADE_BY, flops=known.flops // self.count,
        )  # fmt: skip

    def _piece(self, node: fx.Node, place: Split, i: int) -> fx.Node:
        """Chunk i of a value that stands before the chunks."""
        if (node, place) not in self.pieces:
            self.pieces[node, place] = self._cut(node, place, i)
        return self.pieces[node, place]

    def _cut(self, node: fx.Node, place: Split, i: int) -> fx.Node:
        (dim, outer), known = place, record(node)
        value, type_, layout = self.build.value[node], self._part(known.type, place), self._lay(known.layout, place)
        if outer == 1 and not known.layout.dims[dim]:
            return self._slice(value, dim, i, type_, layout, node)
        if (node, place) not in self.blocks:
            self.blocks[node, place] = self._reshape(value, *self._blocks(node, place, self.count), node)
        blocks = self._slice(self.blocks[node, place], dim + 1, i, *self._blocks(node, place, 1), node)
        return self._reshape(blocks, type_, layout, node)

    def _part(self, type_: TensorType, place: State) -> TensorType:
        """The type of a chunk."""
        if not isinstance(place, tuple):
            return type_
        dim = place[0]
        shape = (*type_.shape[:dim], type_.shape[dim] // self.count, *type_.shape[dim + 1 :])
        return TensorType(shape, type_.dtype)

    def _lay(self, layout: Layout, place: State) -> Layout:
        """The layout of a chunk: of a dim that is read in blocks there are fewer."""
        if not isinstance(place, tuple):
            return layout
        dim = place[0]
        before, after = self._halves(layout, place)
        return Layout((*layout.dims[:dim], (*before, *after), *layout.dims[dim + 1 :]), layout.partial)

    def _blocks(self, node: fx.Node, place: Split, chunks: int) -> tuple[TensorType, Layout]:
        """A value, or `chunks` of its chunks, with the dim read as (what lies outside, chunks, tokens of a chunk)."""
        (dim, outer), (shape, dtype) = place, (record(node).type.shape, record(node).type.dtype)
        layout = record(node).layout
        before, after = self._halves(layout, place)
        sizes, whole = (outer, chunks, shape[dim] // (outer * self.count)), ()
        dims = (*layout.dims[:dim], before, whole, after, *layout.dims[dim + 1 :])
        return TensorType((*shape[:dim], *sizes, *shape[dim + 1 :]), dtype), Layout(dims, layout.partial)

    def _halves(self, layout: Layout, place: Split) -> tuple[tuple[Factor, ...], tuple[Factor, ...]]:
        """The factors of a dim outside of the chunks, and inside of one."""
        dim, outer = place
        before: list[Factor] = []
        after = list(layout.dims[dim])
        position = 1
        while after and position < outer:
            factor = after.pop(0)
            blocks = abs(factor) if isinstance(factor, int) else self.program.mesh[factor]
            if position * blocks > outer:  # a number of blocks, of which some lie outside
                assert isinstance(factor, int) and outer % position == 0, (str(layout), place)
                before.append(outer // position)
                after.insert(0, factor // (outer // position) if factor > 0 else -(-factor // (outer // position)))
                break
            before.append(factor)
            position *= blocks
        if after and isinstance(after[0], int):
            fewer = abs(after[0]) // self.count * (1 if after[0] > 0 else -1)
            after[:1] = [fewer] if fewer != 1 else []
        return tuple(before), tuple(after)

    # -- after -------------------------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node, total: fx.Node | None, part: fx.Node, i: int) -> fx.Node:
        """The sum up to this chunk, of floats in at least float32; the last one in the node's own dtype and name."""
        known, last = record(part), i == self.count - 1
        dtype = known.type.dtype
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        like = known.with_(flops=0)
        if wide != known.type.dtype:
            part = self._cast(part, wide, like)
        if total is not None:
            like = like.with_(types=(TensorType(known.type.shape, wide),))
            part = self.build.lay(aten.add.Tensor, total, part, like=like, name="total")
        if not last:
            return part
        if wide != known.type.dtype:
            part = self._cast(part, known.type.dtype, like)
        set_record(part, record(part).with_(origin=record(node).origin))
        return part

    def _cast(self, value: fx.Node, dtype: torch.dtype, like: Record) -> fx.Node:
        type_ = TensorType(like.type.shape, dtype)
        return self.build.lay(aten._to_copy.default, value, dtype=dtype, like=like, type_=type_, name="cast")

    def _joined(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """The chunks of a value, put together."""
        (place,) = self.region.members[node].results
        assert isinstance(place, tuple)
        (dim, outer), known = place, record(node)
        if outer == 1 and not known.layout.dims[dim]:
            like = known.with_(phase="forward", flops=0)
            return self.build.lay(aten.cat.default, list(parts), dim, like=like, name=f"{node.name}_chunks")
        blocks = [self._reshape(part, *self._blocks(node, place, 1), node) for part in parts]
        type_, layout = self._blocks(node, place, self.count)
        like, name = _like(node), f"{node.name}_chunks"
        joined = self.build.lay(aten.cat.default, blocks, dim + 1, like=like, type_=type_, layout=layout, name=name)
        made = self._reshape(joined, known.type, known.layout, node)
        set_record(made, record(made).with_(origin=known.origin))
        return made

    def _slice(self, value: fx.Node, dim: int, i: int, type_: TensorType, layout: Layout, node: fx.Node) -> fx.Node:
        ends = i * type_.shape[dim], (i + 1) * type_.shape[dim]
        return self.build.lay(
            aten.slice.Tensor, value, dim, *ends, like=_like(node), type_=type_, layout=layout, name="chunk"
        )

    def _reshape(self, value: fx.Node, type_: TensorType, layout: Layout, node: fx.Node) -> fx.Node:
        shape, like = list(type_.shape), _like(node)
        return self.build.lay(aten.reshape.default, value, shape, like=like, type_=type_, layout=layout, name="chunk")


def _gather(node: fx.Node) -> object:
    """What is gathered how, if that is an input; None else."""
    return (node.all_input_nodes[0], *node.args[1:]) if is_gathered_input(node) else None


def _like(node: fx.Node) -> Record:
    return record(node).with_(origin="", reason="", phase="forward", flops=0)
