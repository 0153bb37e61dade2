"""Check what a user gives for a model."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.refusals.constructs import HOOKED, LAZY, SPARSE, WRAPPERS
from autopar.errors import CaptureError


def check_model(model: object, runs_hooks: bool = False) -> None:
    """Raise CaptureError for what is no module, and for one that holds what no capture can look into. runs_hooks: those
    on gradients, as a parallel model does."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"the model is {what}, but it must be an nn.Module that is built already.")
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
