"""What is known of two tensors that are one, without data and in each step; and how a step makes them so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar.capture.data.known_values import Values
from autopar.capture.refusals.constructs import DATA_FORM, DATA_SHARED, DATA_USED, Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.torch_compat import storage_of

Tensor = torch.Tensor
_COMPARISONS: frozenset[Any] = frozenset((torch.equal, Tensor.equal))
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def is_same(one: Any, other: Any) -> bool:
    """True for two names of the same elements in the same memory."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or storage_of(one) is None:
        return False
    return storage_of(one) == storage_of(other) and _form(one) == _form(other)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def compared(function: Any, args: Any) -> Any:
    """What `torch.equal` gives of a tensor and itself, or of two shapes; NotImplemented where their data decide. Of
    itself it would be False where that holds nan."""
    if function not in _COMPARISONS or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
        return NotImplemented
    if args[0].shape != args[1].shape:
        return False
    return True if is_same(*args) else NotImplemented


def set_data(
    called: Callable[..., Any], known: Values, copies: Callable[[Tensor], Iterable[Tensor]], x: Tensor, data: Tensor
) -> None:
    """Write `x.data = data` as a copy into the memory of `x`, by a function that makes calls; nothing for what is there
    already. copies: those that stand for views of a tensor. Raises CaptureError where the two would not be the same."""
    if is_same(x.detach(), data):
        return
    line = user_frame(sys._getframe(1))
    if x.shape != data.shape or x.dtype != data.dtype:
        forms = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (x, data))
        raise refusal(Construct(DATA_FORM.name.format(*forms), DATA_FORM.instead), line)
    if known.is_input(data):
        raise refusal(DATA_SHARED, line)
    if not x.is_leaf or known.is_used(x):
        raise refusal(DATA_USED, line)
    with torch.no_grad():
        called(Tensor.copy_, (), tuple(called(Tensor.detach, (), (tensor,)) for tensor in (x, data)))
    known.parts(x, data, *copies(x), *copies(data))
