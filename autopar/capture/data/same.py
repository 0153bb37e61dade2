"""What is known of two tensors that are one: without data, and in each step."""

from __future__ import annotations

from typing import Any

import torch

from autopar.torch_compat import storage_of

Tensor = torch.Tensor
_COMPARISONS: frozenset[Any] = frozenset((torch.equal, Tensor.equal))
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def is_same(one: Any, other: Any) -> bool:
    """True for two names of the same elements in the same memory."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or storage_of(one) is None:
        return False
    return storage_of(one) == storage_of(other) and _form(one) == _form(other)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def compared(function: Any, args: Any) -> bool | None:
    """What `torch.equal` gives of a tensor and itself, or of two shapes; None where their data decide. Of itself it
    would be False where that holds nan."""
    if function not in _COMPARISONS or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
        return None
    if args[0].shape != args[1].shape:
        return False
    return True if is_same(*args) else None


def is_idle(function: Any, args: Any) -> bool:
    """True for `x.data = x.data`, which changes nothing."""
    return function == _SET_DATA and is_same(args[0].detach(), args[1])
