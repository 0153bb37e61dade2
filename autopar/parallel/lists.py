"""Ops on lists of tensors (`_foreach_*`, fused optimizers), element by element: on the parts of each item."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from autopar.parallel.calls import Call
from autopar.parallel.placed import PlacedTensor, ViewOf
from autopar.parallel.schemas import FUSED, Op
from autopar.torch_compat import local_of, spec_of


def on_parts_alike(func: Any, op: Op, args: Any, kwargs: Any) -> Any:
    """The quick way: all lists have items that lie alike, and nothing else is a tensor with dims."""
    lead: Any = None  # the first list of ours, and how its items lie
    parts = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], PlacedTensor):
            if not all(map(_has_part, set(map(type, arg)))):
                return NotImplemented
            specs = list(map(spec_of, arg))
            lead = lead or (arg, specs)
            if len(specs) != len(lead[1]) or not all(map(is_, specs, lead[1])):
                return NotImplemented
            arg = list(map(local_of, arg))
        elif isinstance(arg, PlacedTensor):
            if arg.ndim or isinstance(arg, ViewOf) or not arg.place.is_replicated:
                return NotImplemented
            arg = local_of(arg)
        elif isinstance(arg, torch.Tensor):
            if arg.ndim:
                return NotImplemented
        elif isinstance(arg, (list, tuple)) and any(isinstance(item, torch.Tensor) and item.ndim for item in arg):
            return NotImplemented
        parts.append(arg)
    if lead is None:
        return NotImplemented
    out = func(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True)))
    return out and _around(out, *lead)


def _has_part(kind: type) -> bool:
    """Whether each tensor of a class has a part of its own."""
    return issubclass(kind, PlacedTensor) and not issubclass(kind, ViewOf)


def _around(out: Any, items: Any, specs: list[Any]) -> list[Any]:
    """What was computed of the items' parts, as tensors that lie where they do."""
    return [
        type(item).make(type(item), part, item.place, spec)
        if part.dtype == item.dtype and part.stride() == local_of(item).stride()
        else item.around(part, item.place, item.shape)
        for item, spec, part in zip(items, specs, out, strict=True)
    ]


def on_parts(call: Call) -> Any:
    """The same for items that lie anyhow: each goes with the item of the list which is written, or of the first."""
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


def _lead(call: Call) -> list[PlacedTensor] | None:
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
