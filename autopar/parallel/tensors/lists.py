"""Ops on lists of tensors (`_foreach_*`, fused optimizers), element by element: on the parts of each item."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch

from autopar.parallel.tensors.placed import PlacedTensor, ViewOf
from autopar.parallel.tensors.schemas import FUSED, Op
from autopar.parallel.tensors.split_call import SplitCall
from autopar.torch_compat import local_of, maker_of, spec_of

_dtype_of, _dim_of = attrgetter("dtype"), torch.Tensor.dim
_is_contiguous, _strides_of = torch.Tensor.is_contiguous, torch.Tensor.stride


def on_parts_alike(func: Any, op: Op, args: Any, kwargs: Any) -> Any:
    """The quick way: all lists have items that lie alike, and nothing else is a tensor with dims.

    What is done for each item is a `map` over a function in C: a line of Python takes as long as torch's own work.
    """
    lead: Any = None  # the first list of ours, how its items lie, and their parts
    given = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], PlacedTensor):
            if isinstance(arg[0], ViewOf) or len(set(map(type, arg))) > 1:
                return NotImplemented
            specs, parts = list(map(spec_of, arg)), list(map(local_of, arg))
            lead = lead or (arg, specs, parts)
            if len(specs) != len(lead[1]) or not all(map(is_, specs, lead[1])):
                return NotImplemented
            arg = parts
        elif isinstance(arg, PlacedTensor):
            if arg.ndim or isinstance(arg, ViewOf) or not arg.place.is_replicated:
                return NotImplemented
            arg = local_of(arg)
        elif isinstance(arg, torch.Tensor):
            if arg.ndim:
                return NotImplemented
        elif isinstance(arg, (list, tuple)) and _has_dims(arg):
            return NotImplemented
        given.append(arg)
    if lead is None:
        return NotImplemented
    out = func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    return out and _around(out, *lead)


def _has_dims(items: Any) -> bool:
    """Whether a tensor with dims is among some items."""
    if set(map(type, items)) == {torch.Tensor}:
        return any(map(_dim_of, items))
    return any(isinstance(item, torch.Tensor) and item.ndim for item in items)


def _around(out: Any, items: Any, specs: list[Any], parts: list[Any]) -> list[Any]:
    """What was computed of the items' parts, as tensors that lie where they do."""
    if not _are_alike(out, parts):
        return [item.around(part, item.place, item.shape) for item, part in zip(items, out, strict=True)]
    made = list(map(maker_of(type(items[0])), out, specs))
    for tensor, item in zip(made, items, strict=True):
        tensor.place = item.place
    return made


def _are_alike(out: Any, parts: list[Any]) -> bool:
    """Whether results have the dtypes and strides of the parts that they were computed of."""
    return list(map(_dtype_of, out)) == list(map(_dtype_of, parts)) and (
        (all(map(_is_contiguous, out)) and all(map(_is_contiguous, parts)))
        or list(map(_strides_of, out)) == list(map(_strides_of, parts))
    )


def on_parts(call: SplitCall) -> Any:
    """Run an op on lists whose items lie anyhow: each goes with its item of the list that is
    written, or of the first."""
    if not call.op.is_pointwise_list:
        return NotImplemented
    lead = _lead(call)
    if lead is None or not all(_fits(arg, lead) for arg in (*call.args, *call.kwargs.values())):
        return NotImplemented
    call.agree()

    def part(value: Any, at: int) -> Any:
        like = lead[at]
        if isinstance(value, PlacedTensor):
            if not isinstance(value, ViewOf) and value.place is like.place and value.shape == like.shape:
                return local_of(value)
            value = call.whole(value)
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return like.place.part_of_operand(value, like.shape)

    def parts(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [part(item, at) for at, item in enumerate(arg)]
        return call.whole(arg) if isinstance(arg, torch.Tensor) else arg

    out = call.func(*map(parts, call.args), **{name: parts(value) for name, value in call.kwargs.items()})
    if not out:
        return out
    return [like.around(item, like.place, like.shape) for item, like in zip(out, lead, strict=True)]


def _lead(call: SplitCall) -> list[PlacedTensor] | None:
    at = call.op.writes[0] if call.op.writes else 0
    found = call.args[at] if isinstance(at, int) else None
    if not isinstance(found, (list, tuple)) or not found:
        return None
    ours = all(isinstance(item, PlacedTensor) and not isinstance(item, ViewOf) for item in found)
    return list(found) if ours else None


def _fits(arg: Any, lead: list[PlacedTensor]) -> bool:
    """Whether an argument goes item by item with the list that leads."""
    if isinstance(arg, torch.Tensor):
        return not arg.ndim
    if not isinstance(arg, (list, tuple)) or not any(isinstance(item, torch.Tensor) for item in arg):
        return True
    return len(arg) == len(lead) and all(
        not isinstance(item, torch.Tensor) or not item.ndim or item.shape == like.shape
        for item, like in zip(arg, lead, strict=True)
    )


__all__ = ["FUSED", "on_parts", "on_parts_alike"]
