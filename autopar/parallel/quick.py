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

from autopar.torch_compat import add_to_versions, maker_of

Method = Callable[..., Any]
_NUMBERS = frozenset({"alpha", "value"})  # keyword arguments of the methods below that may not be tensors
_grad_is_on = torch.is_grad_enabled


def take_short_way(kind: type[Any]) -> None:
    """Give a class of tensors that know their place these methods."""
    for ways, names in (
        (_changed_by_one, "add_ div_ mul_ sub_ __iadd__ __imul__ __isub__ __itruediv__"),
        (_changed_by_two, "addcdiv_ addcmul_ lerp_"),
        (_made_of_itself, "neg sqrt square __neg__"),
        (_made_of_two, "add div mul sub __add__ __mul__ __radd__ __rmul__ __sub__ __truediv__"),
    ):
        for name in names.split():
            quick = ways(kind, getattr(torch.Tensor, name))
            quick.__name__ = name
            setattr(kind, name, quick)


def _changed_by_one(kind: type[Any], method: Method) -> Method:
    """A method in place with one operand."""

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) != 1 or _grad_is_on() or (options and not options.keys() <= _NUMBERS):
            return method(self, *args, **options)
        (operand,) = args
        given = type(operand)
        if given is kind and (operand.spec is self.spec or _is_number(operand, self)):
            operand = operand.part
        elif given is not float and given is not int:
            return method(self, *args, **options)
        add_to_versions((self,))
        method(self.part, operand, **options)
        return self

    return quick


def _changed_by_two(kind: type[Any], method: Method) -> Method:
    """A method in place with two operands."""

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) != 2 or _grad_is_on() or (options and not options.keys() <= _NUMBERS):
            return method(self, *args, **options)
        one, two = args
        spec = self.spec
        if type(one) is not kind or one.spec is not spec:
            return method(self, *args, **options)
        given = type(two)
        if given is kind and (two.spec is spec or _is_number(two, self)):
            two = two.part
        elif given is not float and given is not int:
            return method(self, *args, **options)
        add_to_versions((self,))
        method(self.part, one.part, two, **options)
        return self

    return quick


def _made_of_itself(kind: type[Any], method: Method) -> Method:
    """A method that has no operand but its tensor."""
    new = maker_of(kind)

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if args or options or _grad_is_on():
            return method(self, *args, **options)
        spec = self.spec
        out = method(self.part)
        if out.dtype is not spec.tensor_meta.dtype:
            return method(self)
        made = new(out, spec)
        made.place = self.place
        return made

    return quick


def _made_of_two(kind: type[Any], method: Method) -> Method:
    """A method that makes another tensor of its own and an operand."""
    new = maker_of(kind)

    def quick(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) != 1 or _grad_is_on() or (options and not options.keys() <= _NUMBERS):
            return method(self, *args, **options)
        (operand,) = args
        spec, given = self.spec, type(operand)
        if given is kind and (operand.spec is spec or _is_number(operand, self)):
            operand = operand.part
        elif given is not float and given is not int:
            return method(self, *args, **options)
        out = method(self.part, operand, **options)
        if out.dtype is not spec.tensor_meta.dtype:
            return method(self, *args, **options)
        made = new(out, spec)
        made.place = self.place
        return made

    return quick


def _is_number(operand: Any, tensor: Any) -> bool:
    """Whether every rank holds the one element of an operand, and the result is as large as the tensor."""
    return not operand.ndim and operand.place.is_replicated and bool(tensor.ndim)
