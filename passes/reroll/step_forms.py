"""What an op of one step is for all steps at once: the same op, with the step as its dim 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import argument_place, facts_of
from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType, is_getitem, record
from autopar.passes.rules.local import with_arg
from autopar.passes.rules.rule import Call, Table
from autopar.passes.rules.through import Through, through

aten = torch.ops.aten
VIEWS = (aten.reshape.default, aten.view.default, aten.expand.default)  # their argument is the shape of the result
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
    form = _form(node, stacked, length)
    return form if form is not None and _gives(node, form, stacked, length, table) else None


def _form(node: fx.Node, stacked: Sequence[bool], length: int) -> StepForm | None:
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
    """The op and its arguments where all dims stand one further behind. What names no dim looks at the last ones."""
    args, target, shape = node.args, node.target, record(node).types[0]
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
        by_dims = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
        return by_dims[target], (args[0], list(range(1, ndim + 1)))
    sizes = argument_place(target, "input_sizes")
    if sizes is not None:
        args = with_arg(args, sizes[0], [length, *args[sizes[0]]])  # type: ignore[misc]
    dims = argument_place(target, "dim", "dims")
    if dims is None:
        return target, args
    place, default = dims
    given = args[place] if len(args) > place else default
    is_all = given is None or given == []
    if place > len(args) or (is_all and shape == source):
        return None  # given by its name; or no sum over all dims
    if is_all:
        given = list(range(ndim))
    return target, (*args[:place], _behind(given), *args[place + 1 :])


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
    slots: list[fx.Node] = []
    fx.node.map_arg((node.args, dict(node.kwargs)), slots.append)
    return slots


def with_slots(args: Any, values: Sequence[Any]) -> Any:
    """Arguments with these in place of their operands."""
    left = iter(values)
    return fx.node.map_arg(args, lambda _: next(left))


def _gives(node: fx.Node, form: StepForm, stacked: Sequence[bool], length: int, table: Table) -> bool:
    """Whether torch gives the results of the steps, one behind the other, by its types and by the rule of the op."""
    if is_getitem(node):
        return True
    given = []
    for i, one in enumerate(slots_of(node)):
        own = record(one).type
        shape = (length, *own.shape) if stacked[i] or i in form.repeated else own.shape
        given.append(TensorType(form.shapes.get(i, shape), own.dtype))
    empty = [torch.empty(type_.shape, dtype=type_.dtype, device="meta") for type_ in given]
    args, kwargs = with_slots((form.args, form.kwargs), empty)
    try:
        made = form.target(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    results = [one and TensorType((length, *one.shape), one.dtype) for one in record(node).types]
    tensors = made if isinstance(made, (tuple, list)) else [made]
    if [None if one is None else TensorType(tuple(one.shape), one.dtype) for one in tensors] != results:
        return False
    # Types alone would let an op pass that takes the steps together, as the norm of all rows but one dim.
    known = {i: (0, 1) for i, is_stacked in enumerate(stacked) if is_stacked or i in form.repeated}
    call = Call(
        str(form.target), form.args, form.kwargs, tuple(given), tuple(one for one in results if one is not None)
    )
    found = through(call, known, table, adds=False)
    return isinstance(found, Through) and all(at == (0, 1) for at in found.results)
