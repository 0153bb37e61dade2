"""Our semantic ops in the terms of a compiler: what Inductor traces through, and what it calls as it stands.

Traced are a few ops that fuse with their neighbours: products, attention, the cross entropy, lookups. The others are
opaque; each `Kernel` says which, and why.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import BatchError
from autopar.ir.ops.ops import NAMESPACE, op
from autopar.runtime.executor.kernel_table import KERNELS, function_of
from autopar.runtime.kernels.indices import checked_index
from autopar.runtime.kernels.kernel import Function


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
    kernel = KERNELS.get(target)
    if kernel is None:
        return function_of(target)
    return kernel.traced or (lambda *args, **kwargs: target(*map(_contiguous, args), **kwargs))


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value
