"""Parameters, gradients, optimizer states, and whatever torch computes of them: DTensors with the value of one device.

Each knows its place (place.py). Any function of torch gives on every rank what it gives on one device, or is refused:
operators.py says how. The methods that optimizers call for each tensor have a short way (quick.py).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from autopar.capture.refusals.location import user_line
from autopar.errors import AutoparError
from autopar.parallel.tensors import operators
from autopar.parallel.tensors.held_blocks import blocks, chunks, write_items
from autopar.parallel.tensors.place import Place, refused_blocks
from autopar.parallel.tensors.placed import TO_SAVE, PlacedTensor, Step, ViewOf, follow, refusal, whole_value
from autopar.parallel.tensors.quick import take_short_way
from autopar.torch_compat import (
    SUBCLASSED_DTENSORS,
    TorchDispatchMode,
    hooks_of,
    local_of,
    maker_of,
    no_torch_function,
    spec_of,
    take_in_lists,
    with_spec,
)
from autopar.torch_identity import become, hooked_together

_PARTS = (
    "what is saved at {} are the parts of tensors that this rank holds. Where rank 0 alone writes a file, those of the "
    "other ranks are lost: autopar.save_file(state, path) on every rank, in the place of torch.save, writes whole "
    "tensors. A file for each rank is read again on the same mesh."
)


class _Held(PlacedTensor):
    """What a parameter and a view of one have in common."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return operators.run(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole value, on every rank, in memory of its own; every rank must call this."""
        if has_torch_function_unary(self):  # a capture, which computes with whole values
            return handle_torch_function(_Held.full_tensor, (self,), self)  # type: ignore[no-any-return]
        return _Full.apply(self)  # type: ignore[no-untyped-call, no-any-return]

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """The whole value if all placements are Replicate; other ones give a plain DTensor. Every rank must call it."""
        if has_torch_function_unary(self):
            asked = (self, device_mesh, placements)
            return handle_torch_function(_Held.redistribute, (self,), *asked, **options)  # type: ignore[no-any-return]
        world, replicated = self.place.world, all(placement.is_replicate() for placement in placements or ())
        mesh = device_mesh or spec_of(self).mesh
        if options or placements is None or (mesh is not world.device_mesh and not replicated):
            raise refusal("redistribute")
        value = self.full_tensor()
        if replicated:
            made: Any = self.around(value, world.everywhere(value.ndim), value.shape)
            return made
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's part: the very memory."""
        if has_torch_function_unary(self):
            return handle_torch_function(_Held.to_local, (self,), self)  # type: ignore[no-any-return]
        if not self.place.is_here:
            return _Nothing.of(local_of(self), self.place)
        return _Local.apply(self)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.place.shown

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal("data = ...")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return blocks(self)[index.offset]

    def __reduce_ex__(self, protocol: Any) -> Any:
        part = local_of(self)
        if self.place.is_replicated:
            return _plain(part, self).__reduce_ex__(protocol)
        self.place.world.warn(_PARTS.format(user_line(sys._getframe()) or "an unknown line"))
        part = part.clone() if part.storage_offset() else part  # else torch takes the wrapper for one with memory
        return with_spec(DTensor, part, spec_of(self).plain(), self.requires_grad).__reduce_ex__(protocol)

    def around(self, part: torch.Tensor, place: Place, shape: Sequence[int]) -> ParameterTensor:
        stride = part.stride() if place.is_replicated and not part.is_contiguous() else None
        return PlacedTensor.make(ParameterTensor, part, place, place.spec(part, shape, stride))  # type: ignore[no-any-return]

    def view_by(self, step: Step) -> ViewTensor:
        base, steps = (self.base, (*self.steps, step)) if isinstance(self, ViewTensor) else (self, (step,))
        spec = spec_of(base)
        shown = torch.empty_strided(spec.shape, spec.tensor_meta.stride, dtype=base.dtype, device="meta")
        shown = follow(shown, steps)
        nothing, place = local_of(base).new_empty(0, dtype=shown.dtype), base.place.world.everywhere(shown.ndim)
        made = PlacedTensor.make(ViewTensor, nothing, place, place.spec(nothing, shown.shape, shown.stride()))
        made.base, made.steps = base, steps
        return made  # type: ignore[no-any-return]


def _plain(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of which each rank has all as one that a file of one device holds, which anyone can load: the same
    memory, or its own where that is more than the value."""
    value = value.detach()
    own = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    if isinstance(like, nn.Parameter):
        return nn.Parameter(own, like.requires_grad)
    return own.requires_grad_(like.requires_grad)


def _refused(name: str) -> Callable[..., Any]:
    def method(self: _Held, *args: Any, **kwargs: Any) -> Any:
        raise refusal(name, TO_SAVE)

    return method


for _name in ("__array__", "__dlpack__", "data_ptr", "numpy", "set_", "share_memory_", "storage", "untyped_storage"):
    setattr(_Held, _name, _refused(_name))


class ParameterTensor(_Held):
    """A parameter, gradient or optimizer state, or what was computed of one."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Hold the memory of another tensor from now on."""
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise AutoparError(
                f"'data = ...' of a tensor of a parallel model, {self.dtype} {list(self.shape)} on {self.device}, "
                f"cannot be {value.dtype} {list(value.shape)} on {value.device}: shape, dtype and device stay."
            )
        with torch.no_grad():
            alike = isinstance(value, ParameterTensor) and value.place is self.place
            held: Any = value if alike else torch.empty_like(self).copy_(value)
            self._local_tensor = local_of(held)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterTensor:
        local = local_of(self).detach().clone()
        made = PlacedTensor.make(ParameterTensor, local, self.place, spec_of(self), self.requires_grad)
        memo[id(self)] = made
        own = {name: value for name, value in vars(self).items() if name not in vars(made)}
        vars(made).update(copy.deepcopy(own, memo))
        if not isinstance(self, nn.Parameter):  # torch's copy of a parameter has no gradient
            made.grad = copy.deepcopy(self.grad, memo)
        return made  # type: ignore[no-any-return]


class ViewTensor(_Held, ViewOf):
    """A view of a split tensor: read anew each time, and written through to it."""

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        raise refusal("to_local of a view")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self.detach().clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


take_in_lists(ParameterTensor)
take_short_way(ParameterTensor)
_without_grad = maker_of(ParameterTensor)
_grad_of, _is_none = attrgetter("grad"), partial(is_, None)
take_in_lists(ViewTensor)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: _Held) -> torch.Tensor:  # type: ignore[override]
        held: Any = tensor.detach()
        ctx.place, ctx.shape = tensor.place, tensor.shape
        ctx.like = held.around(local_of(held).new_empty(0), tensor.place, tensor.shape)  # holds no memory of the tensor
        value = whole_value(held, "full_tensor")
        own = isinstance(tensor, ViewOf) or tensor.place.is_replicated
        return value.clone() if own else value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _check_backward(ctx.like)
        return ctx.like.around(ctx.place.part(gradient), ctx.place, ctx.shape)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ParameterTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.like, ctx.place, ctx.shape = tensor.detach(), tensor.place, tensor.shape
        return local_of(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _check_backward(ctx.like)
        return ctx.like.around(gradient.contiguous(), ctx.place, ctx.shape)


def _check_backward(tensor: Any) -> None:
    """Refuse a backward pass from a plain tensor where torch itself takes the ops of DTensors in it (2.11): the
    gradient would become one of torch's own, which knows nothing of our layouts."""
    with no_torch_function():  # as autograd sees it
        try:
            is_ours = isinstance(tensor.detach(), PlacedTensor)
        except AutoparError:  # torch's own ops are told so
            is_ours = False
    if not is_ours:
        raise AutoparError(
            f"torch {torch.__version__} cannot bring a gradient from a plain tensor to a parameter of a parallel "
            f"model: use torch 2.13, or compute with the parameters themselves, `(weight * weight).sum().backward()`."
        )


class _Nothing(torch.Tensor):
    """The part of a rank on another stage: without elements, and what is copied into it goes nowhere.

    torch's `set_model_state_dict(broadcast_from_rank0=True)` copies a whole value into the part of a rank that is not
    on a tensor's mesh.
    """

    place: Place

    @staticmethod
    def of(part: torch.Tensor, place: Place) -> _Nothing:
        made = part.detach().as_subclass(_Nothing)
        made.place = place
        return made

    def copy_(self, *args: Any, **kwargs: Any) -> _Nothing:  # type: ignore[override]
        if self.place.is_fused:  # the ranks that hold it refuse as well
            raise refused_blocks()
        return self


def parameter_tensor(part: torch.Tensor, place: Place, shape: Sequence[int]) -> ParameterTensor:
    """This rank's part of a tensor of `shape`."""
    return PlacedTensor.make(ParameterTensor, part, place, place.spec(part, shape))  # type: ignore[no-any-return]


def accumulate(parameters: Iterable[nn.Parameter], values: Iterable[torch.Tensor | None]) -> None:
    """Add to gradients. None where a parameter lies on other ranks: its gradient is there too, without elements."""
    parts: list[Any] = list(values)
    known: list[Any] = list(parameters)
    with no_torch_function():  # or torch looks, at each attribute, for a function of ours that it would ask
        is_simple = _are_new(known) and not any(map(_is_none, parts))
        if is_simple:
            made = map(_without_grad, parts, map(spec_of, known))  # in C, as far as that goes
            for parameter, gradient in zip(known, made, strict=True):
                gradient.place = parameter.place
                parameter.grad = gradient
    if not is_simple:
        hooked = [pair for each in zip(known, parts, strict=True) for pair in _add_to_gradient(*each)]
        if any(hooked_together(parameter) for parameter, _ in hooked):  # it wants one backward pass
            torch.autograd.backward([p for p, _ in hooked], [gradient for _, gradient in hooked])
        else:
            for parameter, gradient in hooked:
                torch.autograd.backward([parameter], [gradient])


def _are_new(parameters: list[Any]) -> bool:
    """Whether all are of a parallel model and have no gradients yet, nor hooks of the user for them."""
    ours = set(map(type, parameters)) <= {ParameterTensor}
    return ours and all(map(_is_none, map(_grad_of, parameters))) and not any(map(any, map(hooks_of, parameters)))


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leave every `.grad` None: an optimizer passes over such parameters, weight decay and all."""
    for parameter in parameters:
        parameter.grad = None


def as_gradient(parameter: nn.Parameter, value: torch.Tensor | None, is_added: bool = False) -> torch.Tensor:
    """The gradient of a parameter, of this rank's part; None is that of what lies on other ranks. is_added: autograd is
    to add it to `.grad`."""
    if not isinstance(parameter, ParameterTensor):  # of a plain module in the loss
        assert value is not None
        return value
    part = torch.zeros_like(local_of(parameter)) if value is None else value
    held: Any = parameter
    made = PlacedTensor.make(ParameterTensor, part, held.place, spec_of(held))
    if is_added and parameter.grad is None:  # else autograd would make one, of another class
        parameter.grad = torch.zeros_like(made)
    return made


def _add_to_gradient(parameter: nn.Parameter, value: torch.Tensor | None) -> Iterator[tuple[Any, torch.Tensor]]:
    """Where the user has hooks on a parameter autograd does it, with what this gives: it runs them once, on this
    backward pass's gradient."""
    is_hooked = any(hooks_of(parameter)) or not isinstance(parameter, ParameterTensor)
    made = as_gradient(parameter, value, is_added=is_hooked)
    held: Any = parameter
    grad: Any = parameter.grad
    if is_hooked:
        yield parameter, made
    elif grad is None:
        parameter.grad = made
    elif isinstance(grad, ParameterTensor) and grad.place is held.place:
        if value is not None:
            local_of(grad).add_(value)
    elif isinstance(grad, ParameterTensor):  # where its parameter lay before
        become(grad, made.add_(grad.detach()), RuntimeError)
        parameter.grad = grad
    else:  # the user's own
        parameter.grad = made.add_(grad.detach())


# -- torch before 2.13 ----------------------------------------------------------------------------------------------


class _OnOurs(TorchDispatchMode):
    """Takes ops on our tensors before torch does, which has its own way with every DTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, PlacedTensor) for kind in types):
            return operators.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with no_torch_function(), _OnOurs():
        return func(*args, **(kwargs or {}))


if not SUBCLASSED_DTENSORS:
    _Held.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
