"""Parameters that optimizers are quick with: DTensors whose element-wise methods run straight on the local part.

A step of AdamW is eight small ops a parameter; DTensor works out the placements of each result anew, at ten times the
cost of the op. Where all operands are placed alike, an element-wise op on the whole is that op on the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from autopar.torch_compat import SUBCLASSED_DTENSORS, local_of, spec_of, with_spec

_aten = torch.ops.aten
# What is of one placement with its operand: a parameter's optimizer state is quick as well.
_LIKE = frozenset({_aten.clone.default, _aten.detach.default, _aten.empty_like.default, _aten.zeros_like.default})

_NUMBERS = {"alpha", "value"}  # keyword arguments of the methods below that may not be tensors
_METHODS = """
    add add_ addcdiv addcdiv_ addcmul addcmul_ div div_ lerp lerp_ mul mul_ neg neg_ sqrt sqrt_ square square_ sub sub_
    zero_ __add__ __iadd__ __imul__ __isub__ __itruediv__ __mul__ __neg__ __radd__ __rmul__ __sub__ __truediv__
"""
# The same on lists; no norm among them, which would be a sum.
_LISTS = "add addcdiv addcmul div lerp mul neg sqrt sub zero"
_FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
_PAIRWISE = frozenset(
    f"aten::{name}" for op in _LISTS.split() for name in (f"_foreach_{op}", f"_foreach_{op}_", *_FUSED)
)

_OF_EQUAL_PARTS = frozenset(
    f"aten::{name}" for name in ["mean", "var", "std", "var_mean", "std_mean", "median", "nanmean"]
)
_REDUCTIONS = _OF_EQUAL_PARTS | {
    f"aten::{name}" for name in ["amax", "amin", "linalg_vector_norm", "max", "min", "norm", "prod", "sum"]
}


class ParameterTensor(DTensor):
    """A DTensor in all but speed; pickled, it is a plain one.

    It is never a partial sum: a parameter is not, its gradient is reduced, and no method below makes one of these.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _LIKE and not any(kwargs.get(name) for name in ("dtype", "layout", "device")):
            return with_spec(ParameterTensor, func(local_of(args[0]), **kwargs), spec_of(args[0]))
        if func._schema.name in _PAIRWISE and (pairs := _pairwise(args, kwargs)) is not None:
            specs, parts = pairs
            out = func(*parts, **kwargs)
            return out and [with_spec(ParameterTensor, part, spec) for part, spec in zip(out, specs, strict=True)]
        args, kwargs = tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}
        out = _reduced(func, args, kwargs) if func._schema.name in _REDUCTIONS else func(*args, **kwargs)
        # That was an alias; what was written in place is still this object to its holder.
        return args[0] if isinstance(out, DTensor) and func._schema.name.endswith("_") else out

    def _like(self, part: torch.Tensor, spec: Any) -> ParameterTensor:
        """A tensor of this class and placement around another part."""
        made: Any = with_spec(ParameterTensor, part, spec)
        return made

    def _takes_number(self, spec: Any) -> bool:
        """True for the placement of one number that every rank has, as a gradient's clipping factor is."""
        return spec.mesh is spec_of(self).mesh and spec.is_replicated()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_spec(DTensor, local_of(self), spec_of(self), self.requires_grad).__reduce_ex__(protocol)


class NumberTensor(DTensor):
    """A norm or sum of a parameter, which may be partial: DTensor would read this rank's part of it as a number."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tuple(map(_plain, args)), {name: _plain(value) for name, value in (kwargs or {}).items()}
        if func is _aten._local_scalar_dense.default:
            return local_of(_whole(args[0])).item()
        return func(*args, **kwargs)


def _plain(arg: Any) -> Any:
    """An argument as DTensor itself takes it: the same memory."""
    if type(arg) in (ParameterTensor, NumberTensor):
        return with_spec(DTensor, local_of(arg), spec_of(arg))
    return [_plain(item) for item in arg] if isinstance(arg, (list, tuple)) else arg


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction with a result that is right, and whole if it has dims: optimizers that factorise (Adafactor) go on
    with it, and DTensor takes the means of unequal parts for equal ones, and refuses to square a partial norm in place.
    """
    x = args[0]
    if func._schema.name in _OF_EQUAL_PARTS and isinstance(x, DTensor):
        args = (_whole(x), *args[1:])
    out = func(*args, **kwargs)
    if not isinstance(out, DTensor):
        return out
    return _whole(out) if out.ndim else with_spec(NumberTensor, local_of(out), spec_of(out))


def _whole(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _pairwise(args: Any, kwargs: Any) -> tuple[list[Any], list[Any]] | None:
    """The placements of the lists in `args`, and the arguments' local parts; None if the lists are not alike."""
    specs: list[Any] = []
    parts = []
    if any(isinstance(value, DTensor) for value in kwargs.values()):
        return None
    for arg in args:
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], DTensor):
            if not all(type(item) is ParameterTensor and item.is_floating_point() for item in arg):
                return None
            own = [spec_of(item) for item in arg]
            specs = specs or own
            if len(own) != len(specs) or any(a is not b for a, b in zip(own, specs, strict=True)):
                return None
            arg = [local_of(item) for item in arg]
        elif isinstance(arg, torch.Tensor) or (isinstance(arg, (list, tuple)) and any(map(_has_dims, arg))):
            return None
        parts.append(arg)
    return specs, parts


def _has_dims(item: Any) -> bool:
    """A tensor without dims is a step count: the same number on every rank."""
    return isinstance(item, torch.Tensor) and item.ndim > 0


def wrap_like(part: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor around `part`, placed as `like` and of its class."""
    spec = spec_of(like)
    return like._like(part, spec) if isinstance(like, ParameterTensor) else with_spec(DTensor, part, spec)


def parameter_tensor(tensor: DTensor) -> DTensor:
    """The same memory and placement as a quick DTensor, where this torch can have subclasses of it.

    Off the CPU optimizers work on lists by default, of DTensors too, but not of its subclasses.
    """
    if not SUBCLASSED_DTENSORS or local_of(tensor).device.type != "cpu":
        return tensor
    return with_spec(ParameterTensor, local_of(tensor), spec_of(tensor))


def _quick(name: str) -> Callable[..., Any]:
    """A method of Tensor that runs on the local parts if it may: no autograd, and no other operands than numbers and
    tensors of ours of the very same placement."""
    method = getattr(torch.Tensor, name)
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))

    def quick(self: ParameterTensor, *args: Any, **kwargs: Any) -> Any:
        spec, kind = spec_of(self), type(self)
        parts: list[Any] = []
        for arg in args:
            if type(arg) is kind and spec_of(arg) is spec:
                parts.append(local_of(arg))
            elif type(arg) is float or type(arg) is int:
                parts.append(arg)
            elif type(arg) is DTensor and arg.ndim == 0 and self._takes_number(spec_of(arg)):
                parts.append(local_of(arg))
            else:
                return method(self, *args, **kwargs)
        if torch.is_grad_enabled() or not kwargs.keys() <= _NUMBERS:
            return method(self, *args, **kwargs)
        if in_place:
            increment_version(self)
            method(local_of(self), *parts, **kwargs)
            return self
        out = method(local_of(self), *parts, **kwargs)
        return self._like(out, spec) if out.dtype == self.dtype else method(self, *args, **kwargs)

    quick.__name__ = name
    return quick


for _name in _METHODS.split():
    setattr(ParameterTensor, _name, _quick(_name))


def accumulate(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    """Add to a gradient. None where the parameter lies on other ranks: its gradient is there too, without elements."""
    if parameter.grad is None:
        part = torch.zeros_like(local_of(parameter)) if value is None else value  # type: ignore[arg-type]
        parameter.grad = wrap_like(part, parameter)  # type: ignore[arg-type]
    elif value is not None:
        local_of(parameter.grad).add_(value)  # type: ignore[arg-type]
