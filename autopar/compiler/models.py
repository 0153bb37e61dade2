"""Check what a user gives for a model and for its loss."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Inlined
from autopar.capture.inputs.shared_memory import overlapping
from autopar.capture.refusals.constructs import CALLED, HOOKED, LAZY, SPARSE, WRAPPERS
from autopar.errors import CaptureError


def check_model(model: object, loss_fn: object = None, runs_hooks: bool = False) -> None:
    """Raise CaptureError for what is no module, and for one that holds what no capture can look into, or two values in
    one memory; and for a loss that cannot be called. runs_hooks: those on gradients, as a parallel model does."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is {_kind_of(model)}, but it must be an nn.Module that is built already.")
    is_class = isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module)
    if loss_fn is not None and (is_class or not callable(loss_fn)):
        raise CaptureError(f"loss_fn is {_kind_of(loss_fn)}. {CALLED}")
    for path, module in tables.named_modules(model):
        for is_wrapped, construct in WRAPPERS:
            if is_wrapped(module):
                who = f"the module '{path}'" if path else "the model"
                name = construct.name.format(type(module).__name__)
                raise CaptureError(f"{who} is {name}. {construct.instead}")
    for path, tensor in (*tables.named_parameters(model), *tables.named_buffers(model)):
        if tensor.layout != torch.strided:
            raise CaptureError(f"the tensor '{path}' of the model is {SPARSE.name} ({tensor.layout}). {SPARSE.instead}")
    for path, parameter in tables.named_parameters(model):
        for is_kind, construct in (LAZY,) if runs_hooks else (LAZY, HOOKED):
            if is_kind(parameter):
                raise CaptureError(f"the parameter '{path}' {construct.name}. {construct.instead}")
    _check_memory(model)


def check_plain_model(model: object, loss_fn: object) -> None:
    """Raise CaptureError for a parallel model, and for what `check_model` refuses."""
    if isinstance(model, Inlined):
        raise CaptureError(
            "the model is what autopar.parallelize returned, whose parameters are in parts. Give the plain module, "
            "built anew, or ask before it is made parallel."
        )
    check_model(model, loss_fn)


def _kind_of(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _check_memory(model: nn.Module) -> None:
    """Raise CaptureError for a parameter that is trained in memory of which the model holds another tensor: the two
    would be two values from then on."""
    for (entry, tensor), (other, its) in overlapping(state_of(model).entries):
        kinds = entry.kind, other.kind
        if kinds == ("parameter", "parameter") and (tensor.requires_grad or its.requires_grad):
            raise CaptureError(
                f"the parameters '{entry.name}' and '{other.name}' lie in the same memory, but are two objects: "
                f"parallel ones would be two values. Tie them as one nn.Parameter, as in `b.weight = a.weight`; or "
                f"give one of them memory of its own (`b.weight.data = b.weight.data.clone()`)."
            )
        if kinds[0] == "parameter" != kinds[1] and tensor.requires_grad and not _is_computed(model, other.name):
            what = f"the buffer '{other.name}'" if other.kind == "buffer" else f"'{other.name}', which the model keeps,"
            raise CaptureError(
                f"{what} lies in the memory of the parameter '{entry.name}': of a parallel one it would keep the "
                f"values of before the first step. Read the parameter itself in forward ({entry.name}.detach()); or, "
                f"if the values of now are meant, keep a copy: .detach().clone()."
            )


def _is_computed(model: nn.Module, name: str) -> bool:
    """Whether a hook computes a plain attribute before each forward, as that of torch.nn.utils.spectral_norm."""
    path, _, attribute = name.rpartition(".")
    hooks = tables.submodule(model, path)._forward_pre_hooks.values()
    return any(getattr(hook, "name", None) == attribute for hook in hooks)
