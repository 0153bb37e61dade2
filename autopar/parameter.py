"""Parameters that optimizers are quick with: DTensors whose element-wise methods run straight on the local part.

A step of AdamW is eight small ops a parameter; DTensor works out the placements of each result anew, at ten times the
cost of the op. Where all operands are placed alike, an element-wise op on the whole is that op on the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autopar.torch_compat import SUBCLASSED_DTENSORS, local_of, spec_of, with_spec

_aten = torch.ops.aten
# What is of one placement with its operand: a parameter's optimizer state is quick as well.
_LIKE = frozenset({_aten.clone.default, _aten.detach.default, _aten.empty_like.default, _aten.zeros_like.default})


class ParameterTensor(DTensor):
    """A DTensor in all but speed; pickled, it is a plain one.

    It is never a partial sum: a parameter is not, its gradient is reduced, and no method below makes one of these.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LIKE and not any(kwargs.get(name) for name in ("dtype", "layout", "device")):
            return with_spec(ParameterTensor, func(local_of(args[0]), **kwargs), spec_of(args[0]))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # DTensor works on an alias; what was written in place is still this object to its holder.
        return args[0] if isinstance(out, DTensor) and func._schema.name.endswith("_") else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_spec(DTensor, local_of(self), spec_of(self), self.requires_grad).__reduce_ex__(protocol)


def parameter_tensor(tensor: DTensor) -> DTensor:
    """The same memory and placement as a quick DTensor, where this torch can have subclasses of it."""
    return with_spec(ParameterTensor, local_of(tensor), spec_of(tensor)) if SUBCLASSED_DTENSORS else tensor


def _quick(name: str) -> Callable[..., Any]:
    """A method of Tensor that runs on the local parts if it may: no autograd, and no other operands than numbers and
    tensors of ours of the very same placement."""
    method, in_place = getattr(torch.Tensor, name), name.endswith("_") and not name.endswith("__")

    def quick(self: ParameterTensor, *args: Any, **kwargs: Any) -> Any:
        spec, parts = spec_of(self), []
        for arg in args:
            if type(arg) is ParameterTensor and spec_of(arg) is spec:
                parts.append(local_of(arg))
            elif type(arg) is float or type(arg) is int:
                parts.append(arg)
            else:
                return method(self, *args, **kwargs)
        if torch.is_grad_enabled() or not kwargs.keys() <= _NUMBERS:
            return method(self, *args, **kwargs)
        if in_place:
            increment_version(self)
            method(local_of(self), *parts, **kwargs)
            return self
        return with_spec(ParameterTensor, method(local_of(self), *parts, **kwargs), spec)

    quick.__name__ = name
    return quick


_NUMBERS = {"alpha", "value"}  # keyword arguments that may not be tensors
_METHODS = """
    add add_ addcdiv addcdiv_ addcmul addcmul_ div div_ lerp lerp_ mul mul_ neg neg_ sqrt sqrt_ square square_ sub sub_
    zero_ __add__ __iadd__ __imul__ __isub__ __itruediv__ __mul__ __neg__ __radd__ __rmul__ __sub__ __truediv__
"""
for _name in _METHODS.split():
    setattr(ParameterTensor, _name, _quick(_name))
