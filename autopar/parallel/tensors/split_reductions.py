"""Reductions of split tensors to one number: on the parts, then once over the ranks whose parts make up the whole.

The result is on every rank, and is computed of the same numbers in the same order there, so that ranks agree to the
bit. A reduction along some dims takes whole values instead (operators.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.parallel.tensors.placed import PlacedTensor, ViewOf, is_split, tensors_in
from autopar.parallel.tensors.split_call import SplitCall
from autopar.runtime.ranks.process_groups import default_group
from autopar.torch_compat import local_of

Number = Callable[[torch.Tensor], torch.Tensor]


def reduce(call: SplitCall) -> Any:
    """A full reduction of one split tensor."""
    if call.name not in _TABLE or not call.args or not is_split(call.args[0]) or call.op.writes:
        return NotImplemented
    x: Any = call.args[0]
    if len(list(tensors_in(call.args, call.kwargs))) > 1 or not x.numel() or not _is_full(call, x.ndim):
        return NotImplemented
    ours, made = _TABLE[call.name], call.func(_meta(x), *call.args[1:], **call.kwargs)
    if not isinstance(made, torch.Tensor) or made.numel() != 1:
        return NotImplemented
    dtype = _wide(made.dtype)
    total = _over_ranks(call, x, lambda part: ours.part(call, part, dtype), lambda parts: ours.all(call, parts), dtype)
    if call.name == "mean":
        total = total / x.numel()
    return call.wrap_whole(total.to(made.dtype).reshape(made.shape))


def unscale(call: SplitCall) -> Any:
    """What GradScaler calls: gradients divided in place, and whether any rank found one that is not finite."""
    if call.name != "_amp_foreach_non_finite_check_and_unscale_":
        return NotImplemented
    items, found, factor = call.args
    parts = [local_of(item) if isinstance(item, PlacedTensor) else item for item in items]
    mark, factor = (call.whole(value) for value in (found, factor))
    call.func(parts, mark, factor)
    if any(map(is_split, items)):
        call.world.talk(call.name)
        on_device = mark.to(call.world.device)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
        mark.copy_(on_device)
    return None


def _over_ranks(call: SplitCall, x: Any, part: Number, all_: Number, dtype: torch.dtype) -> torch.Tensor:
    """A number of a split tensor: of its parts, then of all ranks' numbers."""
    counting = x.place.ranks_that_count(x.shape)
    here = default_group().rank() in counting
    number = part(local_of(x)).to(dtype) if here else torch.zeros((), dtype=dtype, device=x.device)
    call.world.talk(call.name)
    everyone = call.world.gather_bytes(number.reshape(1))
    return all_(torch.cat([everyone[rank] for rank in counting])).to(x.device)


class _Row:
    """How a reduction is made of parts."""

    def __init__(self, part: Callable[..., torch.Tensor], all_: Callable[..., torch.Tensor] | None = None) -> None:
        self.part = part
        self.all = all_ or (lambda call, parts: part(call, parts, parts.dtype))


def _norm(call: SplitCall, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = None if part.is_complex() else dtype  # torch wants a complex one of complex numbers, whose norm is real
    return torch.linalg.vector_norm(part, _order(call), dtype=wide)


def _norm_of_all(call: SplitCall, parts: torch.Tensor) -> torch.Tensor:
    return parts.sum() if _order(call) == 0 else torch.linalg.vector_norm(parts, _order(call))


def _order(call: SplitCall) -> float:
    order = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", call.kwargs.get("p", 2))
    return 2.0 if order is None else float(order)


def _sum(call: SplitCall, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.sum(dtype=dtype)


def _count(call: SplitCall, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.count_nonzero()


_LARGEST = _Row(lambda call, part, dtype: part.max())
_LEAST = _Row(lambda call, part, dtype: part.min())
_TABLE: dict[str, _Row] = {
    "all": _Row(lambda call, part, dtype: part.bool().all()),
    "amax": _LARGEST,
    "amin": _LEAST,
    "any": _Row(lambda call, part, dtype: part.bool().any()),
    "count_nonzero": _Row(_count, lambda call, parts: parts.sum()),
    "linalg_vector_norm": _Row(_norm, _norm_of_all),
    "max": _LARGEST,
    "mean": _Row(_sum),
    "min": _LEAST,
    "norm": _Row(_norm, _norm_of_all),
    "prod": _Row(lambda call, part, dtype: part.prod(dtype=dtype)),
    "sum": _Row(_sum),
}
_DIMS = ("dim", "axis")


def _is_full(call: SplitCall, ndim: int) -> bool:
    """Whether the reduction is over all dims: what it gives is one number then."""
    names = [argument.name for argument in call.func._schema.arguments]
    for at, name in enumerate(names):
        if name in _DIMS:
            dims = call.args[at] if at < len(call.args) else call.kwargs.get(name)
            if dims is None or dims == []:
                continue
            listed = list(dims) if isinstance(dims, (list, tuple)) else [dims]
            if {dim % max(ndim, 1) for dim in listed} != set(range(ndim)) or not ndim:
                return False
    return True


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which parts are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


__all__ = ["ViewOf", "reduce", "unscale"]
