"""The vectors of a condition as values of a program: [b|1, h|1, s] over the queries, [b|1, h|1, t] over the keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.ir.program import Builder, Record, record
from autopar.passes.masks.mask_values import Vector
from autopar.passes.masks.mask_views import in_order

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
