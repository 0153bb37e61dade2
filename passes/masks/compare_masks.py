"""compare_masks: a mask that compares vectors over queries and keys is known by them, not by its elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.comparisons import TRUE, BoolVector
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, Record, erase_unused, of_parameters, record
from autopar.passes.masks.mask_conditions import MaskCondition, condition_of
from autopar.passes.masks.mask_values import Vector
from autopar.passes.masks.mask_views import axes_of, in_order
from autopar.passes.masks.rowwise import Known
from autopar.passes.search.intents import context_axes

# The vectors of a condition as values of a program: [b|1, h|1, s] over the queries, [b|1, h|1, t] over the keys.

aten = torch.ops.aten


class MaskVectors:
    """Builds vectors; equal ones, of which masks of several layers consist, once."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.made: dict[tuple[Vector, int], fx.Node] = {}

    def node(self, vector: Vector, sizes: Mapping[str, int], user: Record) -> fx.Node:
        """A vector of a mask of these sizes. user: the record of what it is made for."""
        letter = "s" if "s" in "".join(vector.letters) else "t"
        # Positions of queries and of keys are the same numbers.
        key = (vector if vector.node is not None else Vector(None, (), vector.shift)), sizes[letter]
        if key not in self.made:
            made = self._positions(vector, sizes[letter], user) if vector.node is None else self._moved(vector, sizes)
            self.made[key] = made
        return self.made[key]

    def mask(self, vector: Vector, sizes: Mapping[str, int], user: Record) -> fx.Node:
        """A vector over the keys as a mask, [b|1, h|1, 1, t]: what stands in the program, if that is its shape."""
        node = vector.node
        if node is not None and not vector.shift and vector.letters in (("b", "h", "s", "t"), ("b", "h", "", "t")):
            return self.build.value[node]
        column = self.node(vector, sizes, user)
        b, h, t = record(column).type.shape
        return self._reshaped(column, (b, h, 1, t), "columns")

    def _reshaped(self, node: fx.Node, shape: tuple[int, ...], name: str) -> fx.Node:
        known = record(node)
        if known.type.shape == shape:
            return node
        return self.build.infer(aten.reshape.default, node, list(shape), like=known, name=name)

    def _positions(self, vector: Vector, size: int, user: Record) -> fx.Node:
        like = user.with_(phase="forward")
        made = self.build.infer(aten.arange.start, vector.shift, vector.shift + size, like=like, name="positions")
        return self._reshaped(made, (1, 1, size), "positions")

    def _moved(self, vector: Vector, sizes: Mapping[str, int]) -> fx.Node:
        """What stands in the program, its dims in the order of the mask's, plus the shift."""
        assert vector.node is not None
        made, shape, letters = self.build.value[vector.node], record(vector.node).type.shape, vector.letters
        order = in_order(shape, letters)
        assert order is not None
        told = "".join(letters[i] for i in order)
        name = "rows" if "s" in told else "columns"
        if order != sorted(order):
            whole = [*(i for i in range(len(shape)) if i not in order), *order]
            made = self.build.infer(aten.permute.default, made, whole, like=record(made), name=name)
        last = told[-1:] if told[-1:] in ("s", "t") else ""
        wanted = tuple(sizes[letter] if letter and letter in told else 1 for letter in ("b", "h", last))
        made = self._reshaped(made, wanted, name)
        if not vector.shift:
            return made
        return self.build.infer(aten.add.Scalar, made, vector.shift, like=record(made), name=name)


MADE_BY = "compare_masks"
Sizes = dict[str, int]
_MASK_AT = {op("attention"): 3, op("attention_backward"): 4}
_OPS = {3: op("compared_attention"), 4: op("compared_attention_backward")}


def compare_masks(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Causal, window, chunked and padding masks, documents and the like take O(S) memory.

        CAPTURED program
        %q: f32[2,2,6,4] = batch "0"
        %document: i64[2,6] = batch "1"
        %r: i64[2,1,6,1] = aten.reshape.default(%document, [2, 1, 6, 1])
        %c: i64[2,1,1,6] = aten.reshape.default(%document, [2, 1, 1, 6])
        %eq: b8[2,1,6,6] = aten.eq.Tensor(%r, %c)
        %a: (f32[2,2,6,4], f32[2,2,6]) = autopar.attention.default(%q, %q, %q, %eq, False, 0.5)
        %out: f32[2,2,6,4] = operator.getitem(%a, 0)
        return value "y" = %out
    becomes
        CAPTURED program
        %q: f32[2,2,6,4] = batch "0"
        %document: i64[2,6] = batch "1"
        %r: i64[2,1,6,1] = aten.reshape.default(%document, [2, 1, 6, 1])
        %c: i64[2,1,1,6] = aten.reshape.default(%document, [2, 1, 1, 6])
        %rows: i64[2,1,6] = aten.reshape.default(%r, [2, 1, 6])
        %columns: i64[2,1,6] = aten.reshape.default(%c, [2, 1, 6])
        %a: (f32[2,2,6,4], f32[2,2,6]) = autopar.compared_attention.default(%q, %q, %q, [%rows], [%columns], "c0==r0", False, 0.5)
        %out: f32[2,2,6,4] = operator.getitem(%a, 0)
        return value "y" = %out

    The kernel then makes the mask of a block at a time, and computes nothing of blocks that nobody sees. Where the mask
    is causal and no window, the op is told so in place of a comparison, and its work is balanced. A mask of which not
    every element is known to come from such comparisons stays as it is.
    """  # noqa: E501
    known, found, notes = Known(), dict[fx.Node, tuple[MaskCondition, Sizes]](), list[tuple[fx.Node, str]]()
    conditions: dict[tuple[Any, ...], MaskCondition | None] = {}
    for node in program.calls():
        if node.target not in _MASK_AT or node.args[_MASK_AT[node.target]] is None:
            continue
        mask, causal, sizes = _read(node)
        key = mask, causal, tuple(sizes.items())
        if key not in conditions:
            conditions[key] = condition_of(mask, sizes, causal, known)
        condition = conditions[key]
        if condition is not None:
            found[node] = condition, sizes
        elif not record(node).is_backward and {"s", "t"} <= _axes(mask):
            notes.append((mask, _note(node, mask, sizes)))
    if notes and context_axes(plan.mesh):
        weighted = of_parameters(program)
        kept = dict.fromkeys(note for mask, note in notes if mask not in weighted)
        program = program.with_(notes=(*program.notes, *kept)) if kept else program
    if not found:
        return program
    build = Builder(MADE_BY)
    write = _Write(build, MaskVectors(build))
    made = build.rewrite(program, lambda node: write.call(node, *found[node]) if node in found else None)
    erase_unused(made.graph)
    return made


def _axes(mask: fx.Node) -> frozenset[str]:
    shape = record(mask).type.shape
    return axes_of(shape, ("b", "h", "s", "t")[4 - len(shape) :])


def _note(node: fx.Node, mask: fx.Node, sizes: Sizes) -> str:
    """What is told of a mask that stays a tensor."""
    at = record(mask).source or record(node).source
    return (
        f"axis 'cp': the mask of the attention at {record(node).source} stays a tensor of {sizes['s']} x {sizes['t']} "
        f"(made at {at}), since what it compares is not known. Write it as comparisons of positions and of vectors "
        f"over queries and keys, hidden keys as False or -inf (docs/spellings.md)"
    )


def _read(node: fx.Node) -> tuple[fx.Node, bool, Sizes]:
    """The mask of an attention or of its backward, whether it is causal, and the dims that the mask may have."""
    at = _MASK_AT[node.target]
    q, k, _, mask = node.args[at - 3 : at + 1]
    b, h, s, _ = record(q).type.shape  # type: ignore[arg-type]
    sizes = {"b": b, "h": h, "s": s, "t": record(k).type.shape[2]}  # type: ignore[arg-type]
    return mask, bool(node.args[-2]), sizes  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Write:
    """Writes calls with a condition in place of a mask."""

    build: Builder
    vectors: MaskVectors

    def call(self, node: fx.Node, mask_condition: MaskCondition, sizes: Sizes) -> fx.Node:
        at, scale, like = _MASK_AT[node.target], node.args[-1], record(node)
        before, after = self.build.new((node.args[:at], node.args[at + 1 : -2]))
        more: dict[str, int] = {}
        if _is_plain(mask_condition):
            mask = self.vectors.mask(mask_condition.columns[0], sizes, like) if mask_condition.columns else None
            args, target = (*before, mask, *after, mask_condition.causal, scale), node.target
        else:
            sides = mask_condition.rows, mask_condition.columns
            rows, columns = ([self.vectors.node(one, sizes, like) for one in side] for side in sides)
            args, target = (
                (*before, rows, columns, *after, str(mask_condition.condition), mask_condition.causal, scale),
                _OPS[at],
            )
            more = {} if mask_condition.reach is None else {"reach": mask_condition.reach}
        return self.build.call(target, *args, like=like, name=node.name, **more)  # type: ignore[arg-type]


def _is_plain(mask_condition: MaskCondition) -> bool:
    """True if a mask is a vector of bools over the keys, or hides nothing but what is causal: plain attention does."""
    is_vector = (
        isinstance(mask_condition.condition, BoolVector)
        and mask_condition.condition.is_true
        and bool(mask_condition.columns)
    )
    return mask_condition.condition == TRUE or (is_vector and not mask_condition.causal)
