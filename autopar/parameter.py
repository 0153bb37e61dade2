"""Parameters that optimizers are quick with: DTensors whose element-wise ops run straight on the local part.

An optimizer's step is a few hundred small ops; DTensor works out the placements of each result anew, at ten times the cost
of the op. Where all operands are placed alike, an element-wise op on the whole is that op on the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_compat import SUBCLASSED_DTENSORS, local_of, retyped, spec_of, with_spec

# Names of ATen. None reduces, moves or draws anything, and each has as many elements out as in.
_POINTWISE = """
    abs add addcdiv addcmul clamp clamp_max clamp_min copy div exp fill lerp log maximum minimum mul neg pow reciprocal
    rsqrt sign sqrt square sub zero
"""
_LIKE = "clone detach empty_like full_like ones_like zeros_like"  # of the same placement as their first operand
_FUSED = "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_"


class _NotAlike(Exception):
    """The operands are placed differently, or one is whole."""


class ParameterTensor(DTensor):
    """A DTensor in all but speed; what is made of it element by element is one too. Pickled, it is a plain DTensor.

    It is never a partial sum: a parameter is not, its gradient is reduced, and no element-wise op makes one.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = _IN_PLACE.get(func)
        if in_place is not None:
            try:
                return _elementwise(func, args, kwargs, in_place) if kwargs else _quick(func, args, in_place)
            except _NotAlike:
                pass
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # The fallback worked on an alias; what was written in place is still this object to its holder.
        return args[0] if isinstance(out, DTensor) and func._schema.name.endswith("_") else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_spec(DTensor, local_of(self), spec_of(self), self.requires_grad).__reduce_ex__(protocol)


def parameter_tensor(tensor: DTensor) -> DTensor:
    """The same memory and placement as a quick DTensor, where this torch can have subclasses of it."""
    return with_spec(ParameterTensor, local_of(tensor), spec_of(tensor)) if SUBCLASSED_DTENSORS else tensor


def _quick(func: Any, args: Any, in_place: bool) -> Any:
    """`_elementwise` where every tensor is one of ours, of one placement: nothing else is so frequent."""
    spec, parts = None, []
    for arg in args:
        if type(arg) is ParameterTensor:
            if spec is None:
                spec = spec_of(arg)
            elif spec_of(arg) is not spec:
                return _elementwise(func, args, {}, in_place)
            parts.append(local_of(arg))
        elif isinstance(arg, (torch.Tensor, list, tuple)):
            return _elementwise(func, args, {}, in_place)
        else:
            parts.append(arg)
    out = func(*parts)
    return args[0] if in_place else _wrap(out, spec)


def _elementwise(func: Any, args: Any, kwargs: Mapping[str, Any], in_place: bool) -> Any:
    """`func` on the local parts. Raises _NotAlike if that is another thing than `func` on the whole."""
    first = args[0]
    if isinstance(first, (list, tuple)):
        specs = [_spec(item) for item in first]
        out = func(*(_locals(arg, specs) for arg in args), **_scalars(kwargs))
        return out if in_place else [_wrap(part, spec) for part, spec in zip(out, specs, strict=True)]
    # The scalar may come first: `pow.Scalar`.
    spec = _spec(first) if isinstance(first, torch.Tensor) else _spec(args[1])
    out = func(*[_local(arg, spec) if isinstance(arg, torch.Tensor) else arg for arg in args], **_scalars(kwargs))
    return first if in_place else _wrap(out, spec)


def _spec(tensor: Any) -> Any:
    """The placement that all operands must have; no partial sum, of which few functions are sums again."""
    if not isinstance(tensor, DTensor):
        raise _NotAlike
    spec = spec_of(tensor)
    if type(tensor) is not ParameterTensor and any(placement.is_partial() for placement in spec.placements):
        raise _NotAlike
    return spec


def _locals(arg: Any, specs: list[Any]) -> Any:
    """A list goes pairwise with the first list; anything else goes with all of it."""
    if isinstance(arg, (list, tuple)):
        if arg and len(arg) != len(specs):  # AdamW passes an empty list for amsgrad's maxima
            raise _NotAlike
        return [_local(a, spec) if isinstance(a, torch.Tensor) else a for a, spec in zip(arg, specs, strict=False)]
    return _local(arg, None) if isinstance(arg, torch.Tensor) else arg


def _local(tensor: torch.Tensor, spec: Any) -> torch.Tensor:
    """What stands for an operand beside local parts of `spec`. A number is the same on every rank."""
    if not isinstance(tensor, DTensor):
        if tensor.ndim:
            raise _NotAlike
        return tensor
    own = spec_of(tensor)
    if own is not spec and not (
        spec is not None and (own.mesh, own.placements, own.shape) == (spec.mesh, spec.placements, spec.shape)
    ):
        if tensor.ndim or not own.is_replicated():
            raise _NotAlike
    return local_of(tensor)


def _scalars(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in kwargs.items():
        if isinstance(value, DTensor) or (name in ("dtype", "layout", "device") and value is not None):
            raise _NotAlike
    return kwargs


def _wrap(part: torch.Tensor, spec: Any) -> DTensor:
    return with_spec(ParameterTensor, part, spec if part.dtype == spec.tensor_meta.dtype else retyped(spec, part.dtype))


def _overloads() -> Iterator[tuple[Any, bool]]:
    """Every overload of the ops above, and whether it writes its first operand."""
    names = [*_POINTWISE.split(), *(f"_foreach_{name}" for name in _POINTWISE.split())]
    for name in [*names, *(f"{name}_" for name in names), *_LIKE.split(), *_FUSED.split()]:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if not any(argument.is_out for argument in found._schema.arguments):
                yield found, name.endswith("_")


_IN_PLACE: Mapping[Any, bool] = MappingProxyType(dict(_overloads()))
