"""Our semantic ops in the terms of a compiler: what Inductor traces through, and what it calls as it stands.

Traced, because they are a few ops that fuse with their neighbours: products, attention, the cross entropy, lookups.
Called as they stand (opaque): the random ops, whose 32-bit arithmetic wraps, which C++ leaves undefined in the code
that Inductor would write; the gradient of a table, which Inductor would add up by atomics in any order; products by
expert, whose sizes are data; and the check of an index, which is an error and no value. An opaque op gets contiguous
operands, for which its Meta kernel is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.errors import BatchError
from autopar.ir.ops import NAMESPACE, op
from autopar.runtime.attention import attention, attention_backward
from autopar.runtime.callables import function_of
from autopar.runtime.contraction import contract
from autopar.runtime.indices import checked_index
from autopar.runtime.losses import pick

Function = Callable[..., Any]


@torch.library.custom_op(f"{NAMESPACE}::checked_copy", mutates_args=())
def checked_copy(index: torch.Tensor, size: int, ignored: int | None, place: str) -> torch.Tensor:
    """`checked_index`, in memory of its own: a compiler takes a result for that. `place` says where it stands."""
    try:
        return checked_index(index, size, ignored).clone(memory_format=torch.contiguous_format)
    except BatchError as error:
        raise BatchError(f"{error}\n  In {place}") from None


@checked_copy.register_fake
def _(index: torch.Tensor, size: int, ignored: int | None, place: str) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


def decomposed(target: Any, place: str) -> Function:
    """What to trace for a target that is no mesh op. `place` describes its node, for an error at run time."""
    if target == op("checked_index"):
        return lambda index, size, ignored: checked_copy(index, size, ignored, place)
    if target in _OPAQUE:
        return lambda *args, **kwargs: target(*map(_contiguous, args), **kwargs)
    return _TRACED.get(target) or function_of(target)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(_wide(x), -1).to(x.dtype)


def _pick_backward(grad: torch.Tensor, index: torch.Tensor, size: int, *, offset: int = 0) -> torch.Tensor:
    return torch.where(_one_hot(index, size, offset), grad.unsqueeze(-1), 0)


def _cross_entropy_backward(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None,
    *, offset: int = 0,
) -> torch.Tensor:  # fmt: skip
    shift = torch.where(lse == -torch.inf, 0, _wide(lse)).unsqueeze(-1)
    taken = _wide(grad if picked is None else picked).unsqueeze(-1)
    one_hot = torch.where(_one_hot(index, x.shape[-1], offset), taken, 0)
    return ((_wide(x) - shift).exp() * _wide(grad).unsqueeze(-1) - one_hot).to(x.dtype)


def _embedding(weight: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    rows = weight.shape[0]
    if rows == 0 or index.numel() == 0:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    row = index - offset
    found = torch.ops.aten.embedding(weight, row.clamp(0, rows - 1))
    return torch.where(((row >= 0) & (row < rows)).unsqueeze(-1), found, 0)


def _one_hot(index: torch.Tensor, size: int, offset: int) -> torch.Tensor:
    """True at column index - offset of [..., size]; nowhere in a row whose index is outside."""
    return torch.arange(size, device=index.device) == (index - offset).unsqueeze(-1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


_TRACED: Mapping[Any, Function] = MappingProxyType(
    {
        op("contract"): contract,
        op("attention"): attention,
        op("attention_backward"): attention_backward,
        op("logsumexp"): _logsumexp,
        op("pick"): pick,
        op("pick_backward"): _pick_backward,
        op("cross_entropy_backward"): _cross_entropy_backward,
        op("embedding"): _embedding,
    }
)

_OPAQUE = frozenset(map(op, ("dropout", "random", "embedding_backward", "expert_mm", "expert_mm_backward")))
