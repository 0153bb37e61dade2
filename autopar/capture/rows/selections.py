"""Calls that select rows by a mask, or ask for the places of one."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
NONZERO = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


def masked(function: Any, args: Any, is_first: bool = True) -> tuple[Any, Any, Tensor | None]:
    """`x[mask]` or `x[mask] = rows` as a function and arguments, with the mask: None for another call, and in the run
    that is captured for a mask of one element, for a second run would have as many rows."""
    if function in (torch.masked_select, Tensor.masked_select) and len(args) == 2:
        function, args = Tensor.__getitem__, torch.broadcast_tensors(*args)
    return function, args, mask_of(function, args, is_first)


def mask_of(function: Any, args: Any, is_first: bool) -> Tensor | None:
    """The mask by which a call takes or puts rows; None for another call."""
    if function not in (Tensor.__getitem__, Tensor.__setitem__):
        return None
    key = args[1] if isinstance(args[1], tuple) else (args[1],)
    mask = key[0] if key else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim or (is_first and mask.numel() == 1):
        return None
    if args[0].shape[: mask.ndim] != mask.shape or any(isinstance(each, (Tensor, list)) for each in key[1:]):
        return None
    return mask


def selecting(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The mask by which a call selects rows, or their places; None for another call."""
    if asks_for_places(function, args, kwargs):
        mask: Tensor = args[0]
        return mask
    return None if function is Tensor.__setitem__ or kwargs else masked(function, args)[2]


def asks_for_places(func: Any, args: Any, kwargs: Any) -> bool:
    """True where the places of a mask are asked for: a tensor a dim."""
    if func is not torch.where and func not in NONZERO:
        return False
    if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim < 1 or args[0].numel() < 2:
        return False
    if func is torch.where:
        return not kwargs
    return kwargs in ({}, {"as_tuple": True}, {"as_tuple": False})
