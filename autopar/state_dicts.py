"""Between checkpoints and the parameters of a parallel module."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.capture import state_of
from autopar.distribute import is_strided
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, whole
from autopar.ir.program import Input
from autopar.torch_compat import local_of

if TYPE_CHECKING:
    from autopar.module import ParallelModule


def split_loaded(module: ParallelModule, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """A plain checkpoint's whole tensors become DTensors in the parameters' layouts."""
    if metadata.get("assign_to_params_buffers"):
        raise AutoparError(
            "load_state_dict(assign=True) would replace the parameters of a parallel model, which programs and "
            "optimizers hold. Leave assign out: values are copied into this rank's parts."
        )
    parameters = dict(module.original.named_parameters(remove_duplicate=False))
    first = {name: entry.name for entry, _ in state_of(module.original).entries for name in entry.names}
    for name, parameter in parameters.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        layout, home = module._layout(first[name], parameter), module._homes.get(first[name])
        if isinstance(value, DTensor) and is_strided(layout, module._mesh) and not module._distributor.stages:
            value = value.full_tensor()
        if not isinstance(value, DTensor):
            state[prefix + name] = module._distributor.split(value.to(module._device), layout, home)


def without_strides(module: ParallelModule, state: OrderedDict[str, Any], prefix: str, _metadata: Any) -> None:
    """Fused weights (`[3:tp,-]`) leave split in one piece: torch.distributed.checkpoint knows no other split."""
    if module._distributor.stages:
        return  # those tell of their blocks themselves
    first = {name: entry.name for entry, _ in state_of(module.original).entries for name in entry.names}
    for name, layout in list(module._layouts.items()):
        if not is_strided(layout, module._mesh):
            continue
        for alias in (alias for alias, entry in first.items() if entry == name and prefix + alias in state):
            parameter = state[prefix + alias]
            whole_ = module._distributor.gather_everywhere(local_of(parameter), layout, parameter.shape)
            axes = module._mesh.names  # in their order
            dims = tuple(tuple(axis for axis in axes if axis in dim) for dim in layout.dims)
            state[prefix + alias] = module._distributor.split(whole_, Layout(dims))


def describe_state(entry: Input, tensor: torch.Tensor) -> str:
    """A parameter or buffer as ranks compare it."""
    names = " = ".join(entry.names)
    frozen = " frozen" if entry.kind == "parameter" and not tensor.requires_grad else ""
    return f"{entry.kind} {names} {list(tensor.shape)} {tensor.dtype}{frozen}"


def whole_state(module: ParallelModule) -> dict[str, torch.Tensor]:
    """Whole CPU tensors under the original names on rank 0; empty on the other ranks."""
    found = {}
    for entry, tensor in state_of(module.original).entries:
        if entry.kind == "constant":
            continue
        is_part = isinstance(tensor, DTensor)
        local, layout = (
            (local_of(tensor), module._layout(entry.name, tensor)) if is_part else (tensor, whole(tensor.ndim))
        )
        value = module._distributor.gather(local, layout, tensor.shape, module._homes.get(entry.name))
        if value is not None:
            found.update(dict.fromkeys(entry.names, value))
    return {name: found[name] for name in module.original.state_dict(keep_vars=True) if name in found}


def whole_gradients(module: ParallelModule) -> dict[str, torch.Tensor]:
    """Whole CPU gradients by parameter name on rank 0; empty on the others."""
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter.grad, DTensor):
            local, layout = local_of(parameter.grad), module._layout(name, parameter)
            value = module._distributor.gather(local, layout, parameter.shape, module._homes.get(name))
            if value is not None:
                found[name] = value
    return found
