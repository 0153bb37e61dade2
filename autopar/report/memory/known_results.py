"""Know what ops give on the meta device, once an op was called with operands of the same form.

A step repeats its layers and micro-batches, and torch infers what most ops give in Python, in a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.capture.trace.results import Form, call_key, is_decided, is_plain
from autopar.torch_compat import OpOverload, schema_of, storage_of


class KnownResults:
    """Results of the ops of one report, or of all reports of a search."""

    def __init__(self) -> None:
        self._known: dict[Form, tuple[type | None, list[Form]]] = {}  # of several results, with the kind of their list

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` gives. It runs if that is not known."""
        asked = call_key(func, args, kwargs, _form) if _makes_all(func) else None
        if asked is None:
            return func(*args, **kwargs)
        key, operands = asked
        if key in self._known:
            kind, forms = self._known[key]
            made = [_tensor(form) for form in forms]
            return made[0] if kind is None else kind(made)
        result = func(*args, **kwargs)
        kind = type(result) if type(result) in (tuple, list) else None
        tensors = [result] if kind is None else result
        forms = [form for each in tensors if (form := _form(each)) is not None]
        if len(forms) == len(tensors) and _are_new(tensors, forms, operands):
            self._known[key] = kind, forms
        return result


def _form(value: Any) -> Form | None:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.device.type != "meta" or not is_plain(value):
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def _tensor(form: Form) -> torch.Tensor:
    shape, stride, _, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _are_new(tensors: Sequence[torch.Tensor], forms: Sequence[Form], operands: Sequence[torch.Tensor]) -> bool:
    """True for results in memory of their own, as large as they need. Those of some ops show an operand though their
    schemas say nothing of it (`_unsafe_view`)."""
    own = {storage_of(each) for each in tensors}
    if len(own) < len(tensors) or not own.isdisjoint(map(storage_of, operands)):
        return False
    return all(_bytes(each) == _bytes(_tensor(form)) for each, form in zip(tensors, forms, strict=True))


@cache
def _makes_all(func: OpOverload) -> bool:
    """True for an op that is worth a look: views, which torch makes in less time than we do, are not."""
    return is_decided(func) and not any(each.alias_info for each in schema_of(func).returns)
