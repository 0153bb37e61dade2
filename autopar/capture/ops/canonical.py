"""Rewrite calls to canonical forms without false data dependencies: `ones_like(x)` becomes `full(shape, 1)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import fill_of, is_view, is_zeros, made_of
from autopar.ir.ops.ops import op_name

aten = torch.ops.aten

Target = Callable[..., Any]
Call = tuple[Target, tuple[Any, ...], dict[str, Any]]

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_INDEX_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
_INDEX_DTYPES = (torch.int32, torch.int64)


def squeezed_dims(node: fx.Node) -> list[int] | None:
    """The dims that a squeeze takes away; None for another op."""
    if node.target not in _SQUEEZES:
        return None
    shape = _value(node.args[0]).shape
    given: Any = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
    dims = given if isinstance(given, (list, tuple)) else [given]
    return sorted(dim % len(shape) for dim in dims if shape and shape[dim] == 1)


@functools.cache
def view_of_copy(target: Target) -> Target:
    """`diagonal_copy` and its kin as the view that they copy: where nothing is written in place both are one value."""
    name, overload = getattr(target, "_opname", ""), getattr(target, "_overloadname", "")
    if getattr(target, "namespace", "") != "aten" or not name.endswith("_copy") or "strided" in name:
        return target
    view = getattr(getattr(aten, name.removesuffix("_copy"), None), overload, None)
    return view if view is not None and is_view(view) else target


def filled(node: fx.Node) -> Call | None:
    """`ones_like(x)` and its kin as `full(shape, 1)`, and the conjugate or cast of a Python number as that number."""
    number = node.args[0] if node.args else None
    if isinstance(number, Number):  # of torch's own: in the gradient of x * 1j, or where torch.vmap meets x / 2
        if node.target is aten._conj.default:
            return aten.full.default, ([], number.conjugate()), {"dtype": _value(node).dtype}  # type: ignore[attr-defined]
        if node.target is aten._to_copy.default:
            return aten.full.default, ([], number), {"dtype": _value(node).dtype}
    name = op_name(node.target)
    if name == made_of(node.target):
        return None  # it hangs on no tensor
    fill = 0 if name == "new_empty" else fill_of(node)  # what that holds is nobody's to read
    if fill is None or isinstance(fill, fx.Node):
        return None
    value = _value(node)
    return aten.full.default, (list(value.shape), fill), {"dtype": value.dtype}


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The dims of a dense tensor in the order in which they lie in memory, from the outermost; None if it has gaps or
    elements that lie at one place."""
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: (-strides[dim], value.shape[dim] != 1))
    return order if value.permute(order).is_contiguous() else None


def memory_of_operand(node: fx.Node) -> list[int] | None:
    """The memory order of the operand of an `as_strided`; None too if it is a part of a larger memory.

    Its sizes and strides speak of the memory of the traced value; that of a value in a program is another.
    """
    value = _value(node.args[0])
    is_all = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return memory_order(value) if is_all else None


def own_dtype(node: fx.Node) -> dict[str, torch.dtype]:
    """The dtype of a tensor made from nothing, where the call leaves it to torch's default of the moment."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or node.all_input_nodes or node.kwargs.get("dtype") is not None:
        return {}
    takes = any(argument.name == "dtype" and argument.kwarg_only for argument in schema.arguments)
    return {"dtype": _value(node).dtype} if takes else {}


def table_gradient(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(values, index, rows) of what adds rows up by index in a table of zeros, as the gradient of an embedding does:
    `index_put(zeros, [index], values, accumulate=True)`, where negative indices count from the end, and
    `index_add(zeros, 0, index, values)`."""
    if node.target in _INDEX_PUTS and len(node.args) >= 4 and node.args[3] is True:
        table, indices, values, _ = node.args
        index = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    elif node.target is aten.index_add.default and node.args[1] == 0 and not node.kwargs:
        table, _, index, values = node.args
    else:
        return None
    if not (isinstance(table, fx.Node) and isinstance(index, fx.Node) and isinstance(values, fx.Node)):
        return None
    shape, places, given = _value(table).shape, _value(index), _value(values)
    if not shape or not is_zeros(table) or places.dtype not in _INDEX_DTYPES or given.dtype != _value(node).dtype:
        return None
    rows, *rest = shape
    return (values, index, rows) if rows and tuple(given.shape) == (*places.shape, *rest) else None


def choice_by_mask(node: fx.Node) -> tuple[fx.Node, list[int], fx.Node, list[int]] | None:
    """(mask, its shape, values, their shape) of `x[mask] = value`, as they broadcast with `x`: an `index_put` by one
    mask, where all that it selects get the same, is a choice by element, and as many as it selects is nobody's to know.
    None for another one."""
    if node.target not in _INDEX_PUTS or (len(node.args) > 3 and node.args[3]):
        return None
    indices: Any = node.args[1]
    masks = [(at, index) for at, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or _value(masks[0][1]).dtype != torch.bool or not _value(masks[0][1]).ndim:
        return None
    ((before, mask),) = masks
    shape, given = list(_value(mask).shape), list(_value(node.args[2]).shape)
    after = _value(node).ndim - before - len(shape)
    count = len(given) - 1 - after  # the dim of the values that counts what the mask selects
    if count >= 0 and given[count] != 1:
        return None
    wide = given if count < 0 else [*given[:count], *(1 for _ in shape), *given[count + 1 :]]
    values: Any = node.args[2]
    return mask, [*shape, *(1 for _ in range(after))], values, wide


def joined(node: fx.Node) -> list[fx.Node] | None:
    """The operands of a `cat` that hold anything (a cache begins as an empty tensor); None if all do."""
    operands: Any = node.args[0] if node.args else ()
    if node.target is not aten.cat.default or not isinstance(operands, (list, tuple)):
        return None
    held = [operand for operand in operands if _value(operand).numel() > 0]
    same = all(_value(operand).dtype == _value(node).dtype for operand in held)
    return held if held and same and len(held) < len(operands) else None


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
