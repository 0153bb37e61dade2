"""The calls that stand between values of all steps: rows moved, one step unlike the others, dims put elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.program import Builder, Record, record

aten = torch.ops.aten


class CallAdder:
    """Adds calls to a program. like: what they belong to."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.masks: dict[tuple[int, int, int, str], fx.Node] = {}

    def reshaped(self, value: fx.Node, shape: tuple[int, ...], like: Record) -> fx.Node:
        """A value in another shape."""
        if record(value).type.shape == shape:
            return value
        return self.build.infer(aten.reshape.default, value, list(shape), like=like, name="steps")

    def expanded(self, value: fx.Node, shape: tuple[int, ...], like: Record) -> fx.Node:
        """A value that is repeated to a shape."""
        if record(value).type.shape == shape:
            return value
        return self.build.infer(aten.expand.default, value, list(shape), like=like, name="repeated")

    def number(self, value: Any, like: Record) -> fx.Node:
        """A number as a tensor of the dtype of a record."""
        dtype = next(type_.dtype for type_ in like.types if type_ is not None)
        return self.build.infer(aten.full.default, [], value, dtype=dtype, like=like, name="number")

    def chosen(self, length: int, t: int, there: fx.Node, other: fx.Node, like: Record) -> fx.Node:
        """One value in step t and another in all others."""
        ndim = max(len(record(there).type.shape), len(record(other).type.shape))
        mask = self.is_step(length, t, ndim, like)
        return self.build.infer(aten.where.self, mask, there, other, like=like, name="chosen")

    def is_step(self, length: int, t: int, ndim: int, like: Record) -> fx.Node:
        """True in step t, to be broadcast to so many dims."""
        key = length, t, ndim, like.phase
        if key not in self.masks:
            steps = self.build.infer(aten.arange.default, length, like=like, name="step")
            mask = self.build.infer(aten.eq.Scalar, steps, t, like=like, name="is_step")
            self.masks[key] = self.reshaped(mask, (length, *(1,) * (ndim - 1)), like)
        return self.masks[key]

    def moved(self, value: fx.Node, by: int, like: Record) -> fx.Node:
        """In each step the value of the one `by` steps away; zeros where there is none."""
        if not by:
            return value
        return self.build.infer(op("pad_rows"), value, 0, -by, by, like=like, name="pad_rows")

    def behind(self, value: fx.Node, dim: int, known: Record, name: str) -> fx.Node:
        """A value with its first dim before or in the dim `dim` of the rest, in the shape of a record."""
        shape = record(value).type.shape
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        moved = tuple(shape[i] for i in order)
        if moved == known.type.shape:
            return self.build.call(aten.permute.default, value, order, like=known, name=name)
        value = self.build.infer(aten.permute.default, value, order, like=known, name="steps")
        return self.build.call(aten.reshape.default, value, list(known.type.shape), like=known, name=name)


def typed(like: Record, known: Record) -> Record:
    """A record with the types of another one."""
    return like.with_(types=known.types, several=known.several)
