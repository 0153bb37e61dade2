"""The short way of methods that work element by element: straight to the parts.

A step of AdamW is eight small ops a parameter, and torch's dispatch to a tensor subclass costs more than each of them
(docs/decisions/parameters.md). So these methods of a class go to the parts in Python where that is right: without
autograd, all operands are numbers or tensors of the class that lie alike, and the result has the dtype of the tensor.
All else goes torch's way. There is a function for each number of operands: a loop over them costs as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_compat import maker_of
from autopar.torch_shortcuts import add_to_versions

Method = Callable[..., Any]
_NUMBERS = frozenset({"alpha", "value"})  # keyword arguments of the methods below that are no operands
_grad_is_on = torch.is_grad_enabled


def take_short_way(kind: type[Any]) -> None:
    """Give a class of tensors that know their place these methods."""
    for of_operands, names in (
        (_of_none, "neg neg_ sqrt sqrt_ square square_ zero_ __neg__"),
        (_of_one, "add add_ div div_ mul mul_ sub sub_ __iadd__ __imul__ __isub__ __itruediv__"),
        (_of_one, "__add__ __mul__ __radd__ __rmul__ __sub__ __truediv__"),
        (_of_two, "addcdiv addcdiv_ addcmul addcmul_ lerp lerp_"),
    ):
        for name in names.split():
            is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
            quick = of_operands(kind, getattr(torch.Tensor, name), is_in_place)
            quick.__name__ = name
            setattr(kind, name, quick)


def _of_none(kind: type[Any], method: Method, is_in_place: bool) -> Method:
    new = maker_of(kind)

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if args or options or _grad_is_on():
            return method(self, *args, **options)
        if is_in_place:
            add_to_versions((self,))
            method(self._local_tensor)
            return self
        made = _like(self, method(self._local_tensor), new)
        return method(self) if made is None else made

    return quick


def _of_one(kind: type[Any], method: Method, is_in_place: bool) -> Method:
    new = maker_of(kind)

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) != 1 or _grad_is_on() or (options and not _are_numbers(options)):
            return method(self, *args, **options)
        (operand,) = args
        given = type(operand)
        if given is kind and (operand._spec is self._spec or _is_number(operand, self)):
            operand = operand._local_tensor
        elif given is not float and given is not int:
            return method(self, operand, **options)
        if is_in_place:
            add_to_versions((self,))
            method(self._local_tensor, operand, **options)
            return self
        made = _like(self, method(self._local_tensor, operand, **options), new)
        return method(self, *args, **options) if made is None else made

    return quick


def _of_two(kind: type[Any], method: Method, is_in_place: bool) -> Method:
    new = maker_of(kind)

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) != 2 or _grad_is_on() or (options and not _are_numbers(options)):
            return method(self, *args, **options)
        first, second = args
        spec, given = self._spec, type(second)
        if type(first) is not kind or first._spec is not spec:
            return method(self, *args, **options)
        if given is kind and (second._spec is spec or _is_number(second, self)):
            second = second._local_tensor
        elif given is not float and given is not int:
            return method(self, *args, **options)
        if is_in_place:
            add_to_versions((self,))
            method(self._local_tensor, first._local_tensor, second, **options)
            return self
        made = _like(self, method(self._local_tensor, first._local_tensor, second, **options), new)
        return method(self, *args, **options) if made is None else made

    return quick


def _like(tensor: Any, out: torch.Tensor, new: Callable[[torch.Tensor, Any], Any]) -> Any:
    """What was computed of a tensor's part, as a tensor that lies there; None if it has another dtype."""
    spec = tensor._spec
    if out.dtype is not spec.tensor_meta.dtype:
        return None
    made = new(out, spec)
    made.place = tensor.place
    return made


def _are_numbers(options: dict[str, Any]) -> bool:
    """Whether keyword arguments are numbers alone: torch reads one that is a tensor, which has a way of its own."""
    return options.keys() <= _NUMBERS and all(type(value) in (float, int) for value in options.values())


def _is_number(operand: Any, tensor: Any) -> bool:
    """Whether every rank holds the one element of an operand, and the result is as large as the tensor."""
    return not operand.ndim and operand.place.is_replicated and bool(tensor.ndim)
