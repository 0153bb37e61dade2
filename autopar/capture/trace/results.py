"""Know what ops give on tensors without data, once an op was called with operands of the same form.

A model repeats its layers, the run that proves a step steady repeats all of it, and the backward pass asks for the
same sums and products. torch remembers too, but comes to its memory by way of some forty calls in Python an op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import EllipsisType, NoneType
from typing import Any

import torch

from autopar.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    no_function_modes,
    schema_of,
    storage_of,
)
from autopar.torch_shortcuts import fake_maker

_NAMESPACES = ("aten", "prims", "autopar")  # the user's own ops may do anything
_TAGS = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
     torch.Tag.nondeterministic_seeded)
)  # fmt: skip
_LIFTS = ("lift", "lift_fresh", "lift_fresh_copy")  # of tensors with data
# Hashable, and compared by value among those of their own kind.
_VALUES = frozenset(
    (float, bool, complex, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_MOST = 1 << 16  # calls that are remembered
Form = tuple[Any, ...]  # of a tensor without data, or of a call: what its results follow from


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a tensor that an op made. view_of: the place among the operands of the one whose memory it shows;
    None for memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None


@dataclass(frozen=True, slots=True)
class _Results:
    made: tuple[_Form | None, ...]
    kind: type | None  # of the list of several results


@cache
def _memory() -> dict[Form, _Results]:
    """The results of every call so far: what follows from the form of its operands is the same in any capture."""
    return {}


class _Unknown(Exception):
    """An argument of which no form tells all."""


def call_key(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], form: Callable[[Any], Form | None]
) -> tuple[Form, list[Any]] | None:
    """Find the form of a call: the op, the forms of its tensors and the values of its other arguments; and beside it
    these tensors. None if there are none, or an argument of which no form tells all.

    form: that of a tensor; None for one of which it would not tell all, and for what is no tensor.
    """
    key, operands = [func, torch.get_default_dtype()], list[Any]()
    try:
        _add_forms(args, key, operands, form)
        if kwargs:
            key += kwargs
            _add_forms(kwargs.values(), key, operands, form)
    except _Unknown:
        return None
    return (tuple(key), operands) if operands else None


def _add_forms(values: Any, key: list[Any], operands: list[Any], form: Callable[[Any], Form | None]) -> None:
    for value in values:
        kind = type(value)
        if kind is int:
            key.append(value)
        elif kind in _VALUES:
            key += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            key += (kind, len(value))
            _add_forms(value, key, operands, form)
        else:
            known = form(value)
            if known is None:
                raise _Unknown
            key += known
            operands.append(value)


class Results:
    """What ops give on the tensors of one fake mode."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake, self._make, self._memory = fake, fake_maker(fake), _memory()

    def unwritten(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of an op, with stand-ins for the user's own tensors among those that it writes into: no capture
        changes what they hold."""
        if not schema_of(func).is_mutable:
            return args, kwargs
        arguments = enumerate(schema_of(func).arguments)
        written = {at: each.name for at, each in arguments if each.alias_info and each.alias_info.is_write}
        given = tuple(self._stand_in(arg) if at in written else arg for at, arg in enumerate(args))
        names = written.values()
        return given, {name: self._stand_in(arg) if name in names else arg for name, arg in kwargs.items()}

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._stand_in, value))
        is_users = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_users else value

    def call(self, call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `call(*args, **kwargs)` gives, where `call` infers the results of `func`. It runs if none is known,
        unseen by function modes."""
        with no_function_modes():
            asked = call_key(func, args, kwargs, self._form_of) if is_decided(func) else None
            if asked is None:
                return call(*args, **kwargs)
            key, operands = asked
            known = self._memory.get(key)
            if known is None:
                return self._asked(call, args, kwargs, operands, key)
            made = [None if each is None else self._tensor(each, operands) for each in known.made]
            return made[0] if known.kind is None else known.kind(made)

    def _asked(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[FakeTensor],
        key: Form,
    ) -> Any:  # fmt: skip
        """What torch infers, without a look into its own memory."""
        before, self._fake.cache_enabled = self._fake.cache_enabled, False
        try:
            result = call(*args, **kwargs)
        finally:
            self._fake.cache_enabled = before
        results = self._results(result, operands)
        if results is not None:
            if len(self._memory) > _MOST:
                self._memory.clear()
            self._memory[key] = results
        return result

    def _form_of(self, value: Any) -> Form | None:
        if type(value) is not FakeTensor or value.fake_mode is not self._fake or value.constant is not None:
            return None
        if not is_plain(value):
            return None
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device

    def _results(self, result: Any, operands: list[FakeTensor]) -> _Results | None:
        """What is remembered of a result; None if that would not be all of it."""
        is_several = type(result) in (tuple, list)
        tensors = result if is_several else (result,)
        made = tuple(self._form(each, operands) for each in tensors)
        own = {storage_of(tensor) for tensor, form in zip(tensors, made, strict=True) if form and form.view_of is None}
        if None in made or len(own) < sum(form is not None and form.view_of is None for form in made):
            return None
        return _Results(made, type(result) if is_several else None)

    def _form(self, tensor: Any, operands: list[FakeTensor]) -> _Form | None:
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self._fake or tensor.constant is not None:
            return None
        if tensor.requires_grad or not is_plain(tensor) or any(tensor is operand for operand in operands):
            return None
        memory = storage_of(tensor)
        shown = [at for at, operand in enumerate(operands) if storage_of(operand) == memory]
        if len(shown) > 1 or (not shown and tensor.storage_offset() != 0):
            return None  # which of them it shows is not known
        return _Form(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device,
            shown[0] if shown else None,
        )  # fmt: skip

    def _tensor(self, form: _Form, operands: list[FakeTensor]) -> FakeTensor:
        shown = None if form.view_of is None else operands[form.view_of]
        return self._make(form.shape, form.stride, form.offset, form.dtype, form.device, shown)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if shape, strides and place in memory tell all of what a tensor without data is."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.layout != torch.strided)


@cache
def is_decided(func: OpOverload) -> bool:
    """True for an op of torch's or ours whose results follow from the forms of its operands, and which writes none."""
    is_ours = func.namespace in _NAMESPACES and func._opname not in _LIFTS
    return is_ours and not schema_of(func).is_mutable and _TAGS.isdisjoint(func.tags)
