"""The calls that stand between values of all steps: rows moved, one step unlike the others, dims put elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.program import Builder, Record, TensorType, record

aten = torch.ops.aten


class CallAdder:
    """Adds calls to a program. like: what they belong to; of its types the dtype counts, if none is said."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.masks: dict[tuple[int, int, int, str], fx.Node] = {}

    def call(self, target: Any, *args: Any, like: Record, shape: tuple[int, ...], name: str) -> fx.Node:
        """A call whose result has a shape, and the dtype of a record."""
        type_ = TensorType(shape, next(type_.dtype for type_ in like.types if type_ is not None))
        like = like.with_(types=(type_,), several=False, origin="", flops=0)
        return self.build.call(target, *args, like=like, name=name)

    def reshaped(self, value: fx.Node, shape: tuple[int, ...], like: Record) -> fx.Node:
        """A value in another shape."""
        if record(value).type.shape == shape:
            return value
        known = typed(like, record(value))
        return self.call(aten.reshape.default, value, list(shape), like=known, shape=shape, name="steps")

    def expanded(self, value: fx.Node, shape: tuple[int, ...], like: Record) -> fx.Node:
        """A value that is repeated to a shape."""
        if record(value).type.shape == shape:
            return value
        known = typed(like, record(value))
        return self.call(aten.expand.default, value, list(shape), like=known, shape=shape, name="repeated")

    def number(self, value: Any, like: Record) -> fx.Node:
        """A number as a tensor."""
        made = self.call(aten.full.default, [], value, like=like, shape=(), name="number")
        made.kwargs = {"dtype": record(made).type.dtype}
        return made

    def chosen(self, length: int, t: int, there: fx.Node, other: fx.Node, like: Record) -> fx.Node:
        """One value in step t and another in all others."""
        shape = tuple(torch.broadcast_shapes(record(there).type.shape, record(other).type.shape))
        mask = self.is_step(length, t, len(shape), like)
        return self.call(aten.where.self, mask, there, other, like=like, shape=shape, name="chosen")

    def is_step(self, length: int, t: int, ndim: int, like: Record) -> fx.Node:
        """True in step t, to be broadcast to so many dims."""
        key = length, t, ndim, like.phase
        if key not in self.masks:
            numbers, bits = (
                like.with_(types=(TensorType((), dtype),), several=False) for dtype in (torch.int64, torch.bool)
            )
            steps = self.call(aten.arange.default, length, like=numbers, shape=(length,), name="step")
            mask = self.call(aten.eq.Scalar, steps, t, like=bits, shape=(length,), name="is_step")
            self.masks[key] = self.reshaped(mask, (length, *(1,) * (ndim - 1)), like)
        return self.masks[key]

    def moved(self, value: fx.Node, by: int, like: Record) -> fx.Node:
        """In each step the value of the one `by` steps away; zeros where there is none."""
        if not by:
            return value
        known, shape = typed(like, record(value)), record(value).type.shape
        return self.call(op("pad_rows"), value, 0, -by, by, like=known, shape=shape, name="pad_rows")

    def behind(self, value: fx.Node, dim: int, known: Record, name: str) -> fx.Node:
        """A value with its first dim before or in the dim `dim` of the rest, in the shape of a record."""
        shape = record(value).type.shape
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        moved = tuple(shape[i] for i in order)
        if moved == known.type.shape:
            return self.build.call(aten.permute.default, value, order, like=known, name=name)
        value = self.call(aten.permute.default, value, order, like=known, shape=moved, name="steps")
        return self.build.call(aten.reshape.default, value, list(known.type.shape), like=known, name=name)


def typed(like: Record, known: Record) -> Record:
    """A record with the types of another one."""
    return like.with_(types=known.types, several=known.several)
