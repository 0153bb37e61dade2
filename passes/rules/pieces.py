"""Ops that take a tensor apart along a dim or put one together: split, slice, select, cat, pad and their backwards.

Where the pieces are equal blocks, the long dim is (c x): c blocks (whole) of x elements; x may be split, and each
rank then has its part of every block. A slice with a step that divides the dim is (x c). Other cuts are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import (
    FIRST,
    NONE,
    Linear,
    argument,
    build,
    compound,
    dim_argument,
    named,
    names_of,
    replace_dim,
    replicated_rule,
)
from autopar.passes.rules.local import with_arg
from autopar.passes.rules.rule import Arguments, Call, Dim, Dims, Pieces, Row, Rule

BOTH: Linear = (frozenset({0, 1}),)


def _split(call: Call, position: int = 2) -> Rule:
    shape = call.operands[0].shape
    at = dim_argument(call, position)
    lengths = [result.shape[at] for result in call.results]
    dims = named(shape)
    if len(set(lengths)) > 1 or 0 in lengths:
        results = [replace_dim(dims, at, () if length == 1 else (f"x{i}",)) for i, length in enumerate(lengths)]
        replicated = {*dims[at], *(f"x{i}" for i in range(len(lengths)))}
        return build(call, [dims], results, replicated=replicated, linear=FIRST)
    sizes = {"c": len(lengths), "x": lengths[0]}
    operand = replace_dim(dims, at, compound(sizes, "c", "x"))
    result = replace_dim(dims, at, compound(sizes, "x"))
    return build(call, [operand], [result] * len(lengths), replicated={"c"}, sizes=sizes, linear=FIRST)


def _split_sizes_local(pieces: Pieces) -> Arguments:
    args, kwargs = pieces.call.args, dict(pieces.call.kwargs)
    if "x" in pieces.sizes:
        args = with_arg(args, 1, [pieces.sizes["x"]] * len(pieces.call.results))
    return args, kwargs


def _cat(call: Call) -> Rule:
    shape = call.results[0].shape
    if any(len(operand.shape) != len(shape) for operand in call.operands):  # torch lets an empty 1-d tensor pass
        return replicated_rule(call)
    at = dim_argument(call, 1, ndim=len(shape))
    lengths = [operand.shape[at] for operand in call.operands]
    dims = named(shape)
    jointly = (frozenset(range(len(lengths))),)
    if len(set(lengths)) > 1 or 0 in lengths:
        operands = [replace_dim(dims, at, () if length == 1 else (f"x{i}",)) for i, length in enumerate(lengths)]
        replicated = {*dims[at], *(f"x{i}" for i in range(len(lengths)))}
        return build(call, operands, [dims], replicated=replicated, linear=jointly)
    sizes = {"c": len(lengths), "x": lengths[0]}
    result = replace_dim(dims, at, compound(sizes, "c", "x"))
    operand = replace_dim(dims, at, compound(sizes, "x"))
    return build(call, [operand] * len(lengths), [result], replicated={"c"}, sizes=sizes, linear=jointly)


def _stack(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 1, ndim=len(dims) + 1)
    count = len(call.operands)
    new: Dim = ("c",) if count > 1 else ()
    result = (*dims[:at], new, *dims[at:])
    return build(call, [dims] * count, [result], replicated={"c"}, linear=(frozenset(range(count)),))


def _unbind(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 1)
    kept = (*dims[:at], *dims[at + 1 :])
    return build(call, [dims], [kept] * len(call.results), replicated=dims[at], linear=FIRST)


def _select(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 1)
    return build(call, [dims], [(*dims[:at], *dims[at + 1 :])], replicated=dims[at], linear=FIRST)


def _select_backward(call: Call) -> Rule:
    dims = named(call.results[0].shape)
    at = dim_argument(call, 2, ndim=len(dims))
    return build(call, [(*dims[:at], *dims[at + 1 :])], [dims], replicated=dims[at], linear=FIRST)


def _select_scatter(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    at = dim_argument(call, 2)
    return build(call, [dims, (*dims[:at], *dims[at + 1 :])], [dims], replicated=dims[at], linear=BOTH)


def _window(call: Call, position: int, long: int, short: int) -> tuple[str, int]:
    """What a slice of `short` out of `long` takes: ("all", 0), ("block", which), ("stride", first) or ("other", 0)."""
    start = argument(call, position, "start") or 0
    step = argument(call, position + 2, "step", 1)
    start = max(start + long, 0) if start < 0 else min(start, long)
    if step == 1 and short == long:
        return "all", 0
    if step == 1 and short and long % short == 0 and start % short == 0:
        return "block", start // short
    if step > 1 and long % step == 0 and short == long // step and start < step:
        return "stride", start
    return "other", 0


def _sliced(kind: str, dims: Dims, at: int, long: int, short: int) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """The dims of the long and of the short tensor, compound sizes, and what is replicated."""
    if kind == "all":
        return dims, dims, {}, set()
    if kind == "other":
        return dims, replace_dim(dims, at, () if short == 1 else ("x",)), {}, {*dims[at], "x"}
    sizes = {"c": long // short, "x": short}
    order = ("c", "x") if kind == "block" else ("x", "c")
    tall = replace_dim(dims, at, compound(sizes, *order))
    return tall, replace_dim(dims, at, compound(sizes, "x")), sizes, {"c"}


def _slice_row(position: int, *, backward: bool = False, scatter: bool = False) -> Row:
    """A slice whose `dim` is at `position`: of operand 0, of the result (backward), or set by operand 1 (scatter)."""

    def shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if backward:
            return call.results[0].shape, call.operands[0].shape
        return call.operands[0].shape, (call.operands[1] if scatter else call.results[0]).shape

    def rule(call: Call) -> Rule:
        tall, low = shapes(call)
        at = dim_argument(call, position, ndim=len(tall))
        kind, _ = _window(call, position + 1, tall[at], low[at])
        long, short, sizes, replicated = _sliced(kind, named(tall), at, tall[at], low[at])
        if backward:
            return build(call, [short], [long], replicated=replicated, sizes=sizes, linear=FIRST)
        if scatter:
            return build(call, [long, short], [long], replicated=replicated, sizes=sizes, linear=BOTH)
        return build(call, [long], [short], replicated=replicated, sizes=sizes, linear=FIRST)

    def local(pieces: Pieces) -> Arguments:
        call = pieces.call
        tall, low = shapes(call)
        at = dim_argument(call, position, ndim=len(tall))
        kind, first = _window(call, position + 1, tall[at], low[at])
        if kind == "other":
            return call.args, dict(call.kwargs)
        if kind == "all":
            # The size itself may be local; what a slice ends at is cut off there.
            start, end = 0, tall[at]
        else:
            length = pieces.sizes["x"]
            start = first * length if kind == "block" else first
            end = start + length if kind == "block" else length * pieces.sizes["c"]
        step = argument(call, position + 2 + 1, "step", 1)
        return (*call.args[:position], at, start, end, step), {}

    return Row(rule, shape_arg=1 if backward else None, local=local)


def _pad(call: Call, linear: Linear) -> Rule:
    """Padded dims are replicated; `pad` holds (before, after) from the last dim on."""
    source, target = call.operands[0].shape, call.results[0].shape
    pad = call.args[1]
    dims, result = named(source), list(named(target))
    replicated: set[str] = set()
    for at in range(len(source)):
        back = len(source) - 1 - at
        if back < len(pad) // 2 and (pad[2 * back] or pad[2 * back + 1]):
            result[at] = () if target[at] == 1 else (f"p{at}",)
            replicated |= {*dims[at], *result[at]}
    return build(call, [dims], [tuple(result)], replicated=replicated, linear=linear)


def _constant_pad(call: Call) -> Rule:
    return _pad(call, FIRST if argument(call, 2, "value", 0) == 0 else NONE)


def _edge_pad_backward(call: Call) -> Rule:
    """Split the gradient of reflection and replication padding: the input is operand 1, of the result's shape."""
    grad, dims = list(named(call.operands[0].shape, "p")), named(call.results[0].shape)
    count = len(call.args[2]) // 2
    lead = len(dims) - count
    grad[:lead] = dims[:lead]
    replicated = names_of(tuple(grad[lead:]), dims[lead:])
    return build(call, [tuple(grad), dims], [dims], replicated=replicated, linear=FIRST)


_EDGES = {
    f"aten.{kind}_pad{n}d{back}.default": Row(_edge_pad_backward if back else (lambda call: _pad(call, FIRST)))
    for kind in ("reflection", "replication")
    for n in (1, 2, 3)
    for back in ("", "_backward")
}

ROWS: Mapping[str, Row] = {
    "aten.split.Tensor": Row(_split, size_arg=(1, "x")),
    "aten.unsafe_split.Tensor": Row(_split, size_arg=(1, "x")),
    "aten.split_with_sizes.default": Row(_split, local=_split_sizes_local),
    "aten.unsafe_split_with_sizes.default": Row(_split, local=_split_sizes_local),
    "aten.cat.default": Row(_cat),
    "aten.stack.default": Row(_stack),
    "aten.unbind.int": Row(_unbind),
    "aten.select.int": Row(_select),
    "aten.select_backward.default": Row(_select_backward, shape_arg=1),
    "aten.select_scatter.default": Row(_select_scatter),
    "aten.slice.Tensor": _slice_row(1),
    "aten.slice_backward.default": _slice_row(2, backward=True),
    "aten.slice_scatter.default": _slice_row(2, scatter=True),
    "aten.constant_pad_nd.default": Row(_constant_pad),
    **_EDGES,
}
