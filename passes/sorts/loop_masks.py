"""Which masks are those of one loop over experts, and what tells the expert of each row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import dim_of_places, facts_of, is_check, is_view
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import Program, is_getitem, operand_nodes, record

aten = torch.ops.aten
_KEPT = {aten._to_copy.default, aten.clone.default}
_AND = {aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
_NOT_ZERO = {aten.ne.Scalar, aten.gt.Scalar}


class Numbering:
    """What nodes compute, by number: those that compute the same of the same have one."""

    def __init__(self, program: Program) -> None:
        self.of: dict[fx.Node, int] = {}
        known: dict[Any, int] = {}
        for node in program.graph.nodes:
            key: Any = node
            if node.op == "call_function" and not facts_of(node.target).random:
                args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: f"%{self.of[one]}")
                key = (node.target, repr(args))
            self.of[node] = known.setdefault(key, len(known))


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over experts. masks: of each expert the values that say which rows it takes, [rows]. chosen: the most
    experts that a row has. hot: where the masks are pieces of one tensor, or compare one, that."""

    masks: tuple[tuple[fx.Node, ...], ...]
    chosen: int
    hot: Hot | None

    @property
    def first(self) -> fx.Node:
        return self.masks[0][0]

    @property
    def rows(self) -> int:
        return record(self.first).type.shape[0]


@dataclass(frozen=True, slots=True)
class Hot:
    """The tensor that tells the expert of each row: its number, or (dim) a place along a dim. path: the calls from a
    piece of it to the first mask, by which rows lie as that has them. is_whole: no row is without an expert."""

    tensor: fx.Node
    dim: int | None
    path: tuple[fx.Node, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _Traced:
    """What a mask is made of. frame: the same for the masks of a loop. path: None where other masks join it."""

    frame: Any
    expert: int
    chosen: int
    base: fx.Node
    path: tuple[fx.Node, ...] | None


def find_loops(program: Program, values: Numbering) -> Iterator[Loop]:
    """The loops over experts of a program: two or more masks that choose by one tensor the rows of a product each."""
    found: dict[Any, dict[int, list[fx.Node]]] = {}
    traced: dict[fx.Node, _Traced] = {}
    for node in program.calls():
        mask = mask_of_index(node)
        if mask is None or mask in traced:
            continue
        known = _trace(mask, values)
        if known is not None:
            traced[mask] = known
            found.setdefault((known.frame, record(mask).type), {}).setdefault(known.expert, []).append(mask)
    for experts in found.values():
        if len(experts) > 1:
            masks = tuple(tuple(experts[expert]) for expert in sorted(experts))
            first = traced[masks[0][0]]
            yield Loop(masks, min(first.chosen, len(masks)), _hot(first, sorted(experts)))


def mask_of_index(node: fx.Node) -> fx.Node | None:
    """The mask of rows of which a product takes only those, by `where(mask, 0, 1)`; None for other nodes."""
    if node.target is not aten.where.self:
        return None
    mask, chosen, other = node.args
    is_index = constant(chosen) == 0 and constant(other) == 1 and record(node).type.dtype == torch.int64
    products = (op("expert_mm"), op("expert_mm_backward"))
    if not is_index or not node.users or any(user.target not in products for user in node.users):
        return None
    return mask if isinstance(mask, fx.Node) and len(record(mask).type.shape) == 1 else None


def constant(value: object) -> object:
    """The number that an argument is, or is filled with."""
    if isinstance(value, fx.Node):
        return 0 if value.target is aten.zeros.default else value.args[1] if value.target is aten.full.default else None
    return value


def _trace(node: fx.Node, values: Numbering) -> _Traced | None:
    """What a mask is made of, back to the comparison with an expert's number or the piece of an expert."""
    args: Any = node.args
    if node.target is aten.eq.Scalar and isinstance(args[1], int) and not record(args[0]).type.dtype.is_floating_point:
        return _Traced(("eq", values.of[args[0]]), args[1], 1, node, ())
    if node.target is aten.select.int and isinstance(args[2], int) and args[2] >= 0:
        return _Traced(("select", values.of[args[0]], args[1]), args[2], _most(args[0], args[1]), node, ())
    if node.op != "call_function" or is_getitem(node):
        return None
    if node.target in _AND:
        for one in args:
            known = _trace(one, values) if isinstance(one, fx.Node) else None
            if known is not None:
                return _Traced(("and", known.frame), known.expert, known.chosen, known.base, None)
        return None
    is_any = node.target is aten.sum.dim_IntList and record(args[0]).type.dtype is torch.bool
    if not (is_any or _keeps(node)):
        return None
    known = _trace(args[0], values)
    if known is None:
        return None
    frame = (str(node.target), repr(args[1:]), repr(dict(node.kwargs)), known.frame)
    if not is_any:
        return _Traced(
            frame, known.expert, known.chosen, known.base, None if known.path is None else (*known.path, node)
        )
    dims = [args[1]] if isinstance(args[1], int) else args[1]
    together = math.prod(record(args[0]).type.shape[dim] for dim in dims)
    return _Traced(frame, known.expert, known.chosen * together, known.base, None)


def _keeps(node: fx.Node) -> bool:
    """True for a call of one operand that shows it otherwise, or says where it is not zero."""
    if len(operand_nodes(node)) != 1:
        return False
    if node.target in _NOT_ZERO:
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    is_same = node.target in _KEPT or is_check(node.target)
    return is_same or (is_view(node.target) and op_name(node.target) not in ("select", "slice"))


def _hot(first: _Traced, experts: Sequence[int]) -> Hot | None:
    """What tells the expert of each row; None where the masks have to be put together."""
    tensor, place = first.base.args[:2]
    assert isinstance(tensor, fx.Node)
    if first.chosen != 1 or first.path is None or list(experts) != list(range(len(experts))):
        return None
    if first.base.target is aten.eq.Scalar:
        return Hot(tensor, None, first.path, _below(tensor, len(experts)))
    assert isinstance(place, int)
    shape = record(tensor).type.shape
    return Hot(tensor, place, first.path, _is_whole(tensor, len(experts))) if shape[place] == len(experts) else None


def _is_whole(tensor: fx.Node, experts: int) -> bool:
    """True if each row of a one-hot tensor has an expert."""
    while _keeps(tensor):
        tensor = tensor.args[0]  # type: ignore[assignment]
    if tensor.target is not aten.eq.Tensor:
        return False
    key = tensor.args[0]
    while isinstance(key, fx.Node) and _keeps(key):
        key = key.args[0]  # type: ignore[assignment]
    return isinstance(key, fx.Node) and _below(key, experts)


def _below(key: fx.Node, experts: int) -> bool:
    """True if a number is the place of an element among that many."""
    while _keeps(key):
        key = key.args[0]  # type: ignore[assignment]
    source: Any = key.args[0] if is_getitem(key) and key.args[1] == 1 else key
    along = dim_of_places(source)
    return along is not None and record(source.args[0]).type.shape[along] <= experts


def _most(tensor: fx.Node, dim: int) -> int:
    """How many places along a dim are not zero at most."""
    shape = record(tensor).type.shape
    dim, args = dim % len(shape), tensor.args
    size: int = shape[dim]
    name = op_name(tensor.target) if tensor.op == "call_function" else ""
    if tensor.target in _KEPT or tensor.target in _NOT_ZERO:
        return _most(args[0], dim)  # type: ignore[arg-type]
    if tensor.target in _AND:
        found = [_most(one, dim) for one in operand_nodes(tensor) if record(one).type.shape == shape]
        return min(found, default=size)
    if name == "eq" and isinstance(args[1], fx.Node):
        return 1 if dim == len(shape) - 1 and args[1].target is aten.arange.default else size
    if name == "scatter" and constant(args[0]) == 0 and args[1] in (dim, dim - len(shape)):
        return record(args[2]).type.shape[dim]  # type: ignore[arg-type]
    if is_view(tensor.target) and isinstance(args[0], fx.Node):
        before = _dim_before(tensor, dim, _VIEWS)
        return size if before is None else _most(args[0], before)
    return size


def _permuted(dim: int, sizes: Sequence[int], made: Sequence[int], args: Any) -> int | None:
    return int(args[1][dim]) % len(sizes)


def _transposed(dim: int, sizes: Sequence[int], made: Sequence[int], args: Any) -> int | None:
    pair = [one % len(sizes) for one in args[1:3] or (0, -1)]
    return pair[1 - pair.index(dim)] if dim in pair else dim


def _reshaped(dim: int, sizes: Sequence[int], made: Sequence[int], args: Any) -> int | None:
    """The dim that is as long and has as many before it."""
    outer = math.prod(made[:dim])
    places = (i for i, size in enumerate(sizes) if size == made[dim] and math.prod(sizes[:i]) == outer)
    return next(places, None)


_VIEWS: Mapping[str, Any] = {"permute": _permuted, "transpose": _transposed, "t": _transposed}


def _dim_before(view: fx.Node, dim: int, views: Mapping[str, Any]) -> int | None:
    """The dim of a view's operand that a dim of it shows whole."""
    sizes, made = record(view.args[0]).type.shape, record(view).type.shape  # type: ignore[arg-type]
    if math.prod(sizes) != math.prod(made):
        return None
    found: int | None = views.get(op_name(view.target), _reshaped)(dim, sizes, made, view.args)
    return found
