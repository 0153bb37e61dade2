"""The number of rows that came to their owner, in the arguments of calls that name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import OWNED
from autopar.ir.program import Builder, Record, record
from autopar.passes.collectives.sized import Cut
from autopar.passes.rules.rule import Arguments, Call, Rule

aten = torch.ops.aten


def owned_name(cuts: Mapping[str, list[Cut]]) -> str | None:
    """The name of which the rows of a call are with their owners."""
    return next((name for name, cut in cuts.items() if any(outer == OWNED for outer, _, _ in cut)), None)


def counted(
    arguments: Arguments, call: Call, rule: Rule, shapes: list[tuple[int, ...]], sizes: Mapping[str, int], name: str,
    rows: fx.Node, ask: Callable[[list[tuple[int, ...]], Mapping[str, int]], Arguments],
) -> Arguments:  # fmt: skip
    """The arguments of a call of which those that grow with the rows of a name are `rows`, a number known when it runs.

    Which they are is found by asking for the arguments of twice as many. ask: for those of other shapes and sizes.
    """
    more = [
        tuple(size * 2 if dim == (name,) else size for size, dim in zip(shape, dims, strict=True))
        for shape, dims in zip(shapes, rule.results, strict=True)
    ]
    args, kwargs = ask(more, {**sizes, name: 2 * sizes[name]})

    def pick(few: Any, many: Any) -> Any:
        if isinstance(few, (list, tuple)) and isinstance(many, (list, tuple)):
            return type(few)(pick(*pair) for pair in zip(few, many, strict=True))
        if isinstance(few, int) and isinstance(many, int) and few != many:
            assert (few, many) == (sizes[name], 2 * sizes[name]), (call.op, few, many)
            return rows
        return few

    known, kept = arguments
    return pick(known, args), {key: pick(value, kwargs.get(key, value)) for key, value in kept.items()}


def count_of(build: Builder, x: fx.Node, dim: int, like: Record) -> fx.Node:
    """How many rows a rank has of a value."""
    operands = (record(x).layout,)
    scalar = Record((None,), operands=operands, module=like.module, source=like.source, phase=like.phase)
    return build.call(aten.sym_size.int, x, dim, like=scalar, name="rows")
