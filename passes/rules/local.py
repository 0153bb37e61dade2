"""The arguments of a call on one rank's pieces of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.passes.rules.rule import Arguments, Call, Pieces, Reading, Row, Rule


def local_call(
    call: Call,
    row: Row,
    rule: Rule,
    result_shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int],
    offset: Any = None,
    readings: Mapping[str, Reading] | None = None,
    starts: Sequence[Any] = (),
) -> Arguments:
    """The args and kwargs of `call` when each name has its local size; tensors among them stay as they are.

    result_shapes: the local shapes of `call.results`.
    sizes: the local size of every name of the rule.
    offset: where the piece of the indexed name begins (a number or a node); None if that name is not split.
    readings: how each split name is cut; only ops whose values depend on positions (dropout) read it.
    starts: the first position of each run of the piece of a split positional name (numbers or nodes).
    """
    if row.local is not None:
        pieces = Pieces(call, rule, tuple(result_shapes), sizes, offset, readings or {})
        args, kwargs = row.local(pieces)
    else:
        args, kwargs = call.args, dict(call.kwargs)
    if row.shape_arg is not None:
        args = with_arg(args, row.shape_arg, list(result_shapes[0]))
    if row.size_arg is not None:
        position, name = row.size_arg
        if name in sizes:
            args = with_arg(args, position, sizes[name])
    if offset is not None:
        assert rule.indexed, call.op
        kwargs["offset"] = offset
    if starts:
        assert rule.positional, call.op
        kwargs["starts"] = list(starts)
    return args, kwargs


def with_arg(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    """`args` with one of them replaced."""
    assert position < len(args), (args, position)
    return (*args[:position], value, *args[position + 1 :])
