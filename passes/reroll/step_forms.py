"""What an op of one step is for all steps at once: the same op, with the step as its dim 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import op
from autopar.ir.program import is_getitem, record
from autopar.passes.rules.rule import Table

aten = torch.ops.aten
# The argument that names dims, and what it is if it is not given. Dims that are counted from the end stay.
DIMS: Mapping[Any, tuple[int, Any]] = {
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int), (1, None)),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), (1, None)),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten.cumsum.default), (1, None)),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), (2, None)),
    **dict.fromkeys((aten.flip.default, aten.any.dim, aten.all.dim, aten.linalg_vector_norm.default), (1, None)),
    **dict.fromkeys((aten.slice.Tensor, aten.cat.default, aten.stack.default, aten.unbind.int), (1, 0)),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), (2, 0)),
    **dict.fromkeys((aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default), (2, 0)),
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), (2, None)),
}
VIEWS = (aten.reshape.default, aten.view.default, aten.expand.default)  # their argument is the shape of the result
SIZED = (aten.select_backward.default, aten.slice_backward.default)  # of the whole, their second argument
# These look at the last dims alone.
LAST = frozenset(
    (op("rms_norm"), op("logsumexp"), aten.constant_pad_nd.default, aten.native_layer_norm.default,
     aten.tril.default, aten.triu.default)
)  # fmt: skip
Slots = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class StepForm:
    """A call on values of all steps. args and kwargs hold the operands of the sample, in their order; shapes: of those
    that get dims of size 1; whole: those of one value for all steps that are repeated."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Mapping[int, tuple[int, ...]]
    repeated: frozenset[int] = frozenset()


def form_of(node: fx.Node, stacked: Sequence[bool], length: int, table: Table) -> StepForm | None:
    """A call for all steps, whose operands are `stacked` or the same for all. None if it has none."""
    found = _form(node, stacked, length, table)
    return found if found is not None and _gives(node, found, stacked, length) else None


def _form(node: fx.Node, stacked: Sequence[bool], length: int, table: Table) -> StepForm | None:
    facts = facts_of(node.target)
    if facts.random:
        return None
    operands = slots_of(node)
    if facts.pointwise:
        return _pointwise(node, operands, stacked, length)
    equation = equation_of(node)
    if equation is not None:
        return StepForm(op("einsum"), (*node.args[:2], with_step(equation, stacked)), {}, {})
    if is_getitem(node):
        return StepForm(node.target, node.args, {}, {})
    args = _with_dims(node, length)
    if args is None:
        return None
    target, args = args
    shapes: dict[int, tuple[int, ...]] = {}
    if node.target is aten.expand.default:
        own, shape = record(operands[0]).type.shape, record(node).type.shape
        shapes[0] = (length, *(1,) * (len(shape) - len(own)), *own)
    repeated = frozenset(i for i, one in enumerate(stacked) if not one)
    return StepForm(target, args, dict(node.kwargs), shapes, repeated)


def _pointwise(node: fx.Node, operands: Sequence[fx.Node], stacked: Sequence[bool], length: int) -> StepForm | None:
    known = record(node)
    first = next(type_ for type_ in known.types if type_ is not None)
    shapes = {}
    for i, (one, is_stacked) in enumerate(zip(operands, stacked, strict=True)):
        own = record(one).type
        if not own.shape and own.dtype != first.dtype and first.dtype != torch.bool:
            return None  # a number's dtype does not count, a tensor's would
        if is_stacked and len(own.shape) < len(first.shape):
            shapes[i] = (length, *(1,) * (len(first.shape) - len(own.shape)), *own.shape)
    return StepForm(node.target, node.args, dict(node.kwargs), shapes)


def _with_dims(node: fx.Node, length: int) -> tuple[Any, tuple[Any, ...]] | None:
    """The op and its arguments where all dims stand one further behind."""
    args, target, shape = node.args, node.target, record(node).types[0]
    if target in LAST:
        return target, args
    if target in VIEWS:
        assert shape is not None
        return target, (args[0], [length, *shape.shape], *args[2:])
    source = record(slots_of(node)[0]).types[0]
    ndim = len(source.shape) if source is not None else 0
    if target is aten.permute.default:
        order: Any = args[1]
        return target, (args[0], [0, *(dim % ndim + 1 for dim in order)])
    if target is aten.t.default and ndim == 2:
        return aten.transpose.int, (args[0], 1, 2)
    if target is aten.transpose.int:
        return target, (args[0], *(_behind(dim) for dim in args[1:]))
    if target in (aten.sum.default, aten.mean.default):
        dims = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
        return dims[target], (args[0], list(range(1, ndim + 1)))
    if target not in DIMS:
        return None
    place, default = DIMS[target]
    given = args[place] if len(args) > place else default
    if given is None or given == []:
        given = list(range(ndim))
    args = (*args[:place], _behind(given), *args[place + 1 :])
    if target in SIZED:
        args = (args[0], [length, *args[1]], *args[2:])  # type: ignore[misc]
    return target, args


def _behind(dims: Any) -> Any:
    if isinstance(dims, (list, tuple)):
        return list(map(_behind, dims))
    return dims + 1 if dims >= 0 else dims


def equation_of(node: fx.Node) -> str | None:
    """A product as an einsum; None for other ops."""
    if node.target is aten.mm.default:
        return "ab,bc->ac"
    return str(node.args[2]) if node.target is op("einsum") else None


def with_step(equation: str, stacked: Sequence[bool], summed: bool = False) -> str:
    """An einsum with a letter for the step, over which it may sum."""
    left, result = equation.split("->")
    letter = next(one for one in "tuvwxyzsrqponmlkjihgfedcbaTUVWXYZ" if one not in equation)
    parts = [letter * one + names for one, names in zip(stacked, left.split(","), strict=True)]
    return f"{','.join(parts)}->{letter * (not summed)}{result}"


def slots_of(node: fx.Node) -> list[fx.Node]:
    """The operands of a node as they stand in its arguments, those of several results too."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def with_slots(args: Any, values: Sequence[Any]) -> Any:
    """Arguments with these in place of their operands."""
    left = iter(values)
    return fx.node.map_arg(args, lambda _: next(left))


def _gives(node: fx.Node, form: StepForm, stacked: Sequence[bool], length: int) -> bool:
    """Whether torch gives the results of the steps, one behind the other."""

    def empty(i: int, one: fx.Node) -> Any:
        found = []
        for type_ in record(one).types:
            shape = (length, *type_.shape) if stacked[i] or i in form.repeated else type_.shape  # type: ignore[union-attr]
            found.append(torch.empty(form.shapes.get(i, shape), dtype=type_.dtype, device="meta"))  # type: ignore[union-attr]
        return found if record(one).several else found[0]

    values = [empty(i, one) for i, one in enumerate(slots_of(node))]
    args, kwargs = with_slots((form.args, form.kwargs), values)
    try:
        made = form.target(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    results = made if isinstance(made, (tuple, list)) else [made]
    wanted = [None if type_ is None else ((length, *type_.shape), type_.dtype) for type_ in record(node).types]
    return [(tuple(one.shape), one.dtype) for one in results] == wanted
