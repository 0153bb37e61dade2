"""Initialise the parameters of a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import state_of
from autopar.errors import CaptureError

_DEPTH = 3  # of lists in lists
_RESET = ("reset_parameters", "_reset_parameters")


def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give the meta tensors of `model` memory on `device` and the values of its modules' `reset_parameters()`.

    Modules reset bottom-up, so that an outer module may have the last word; one that also holds real tensors resets
    only if it owns a meta tensor itself. Tied tensors stay tied; all ranks
    draw the same numbers. Raises CaptureError naming the tensors that no `reset_parameters()` fills.
    """
    entries = [(entry, tensor) for entry, tensor in state_of(model).entries if tensor.device.type == "meta"]
    if not entries:
        return
    made = {}
    for entry, tensor in entries:
        value = torch.full(tensor.shape, _mark(tensor.dtype), dtype=tensor.dtype, device=device)
        made[entry.name] = nn.Parameter(value, tensor.requires_grad) if entry.kind == "parameter" else value
        for name in entry.names:
            assign(model, name, made[entry.name], entry.kind)
    assign_inside(model, {id(tensor): made[entry.name] for entry, tensor in entries if entry.kind == "parameter"})
    on_meta = {name for entry, _ in entries for name in entry.names}
    everything = {name for entry, _ in state_of(model).entries for name in entry.names}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for path, module in reversed(list(model.named_modules())):
            inside = {name for name in everything if name.startswith(f"{path}." if path else "")}
            own = any(name.rpartition(".")[0] == path for name in on_meta)
            reset = next((getattr(module, name) for name in _RESET if hasattr(module, name)), None)
            if callable(reset) and (own or (inside and inside <= on_meta)):
                reset()
    empty = [f"'{entry.name}'" for entry, _ in entries if _is_marked(made[entry.name])]
    if empty:
        raise CaptureError(
            f"the model is on the meta device, and no reset_parameters() gives values to {', '.join(empty[:3])}"
            f"{f' and {len(empty) - 3} more' if empty[3:] else ''}. Define reset_parameters() on the module that owns "
            f"{'them' if empty[1:] else 'it'}, or build the model on a real device."
        )


def assign(model: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
    """Put `tensor` in the place of the parameter, buffer or plain attribute `name`."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    if kind == "buffer":
        owner.register_buffer(attribute, tensor, persistent=attribute not in owner._non_persistent_buffers_set)
    else:
        setattr(owner, attribute, tensor)


def assign_inside(model: nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Put tensors in the place of those that the lists and dicts of modules hold as well, by the ids of these."""
    for module in model.modules():
        for value in vars(module).values():
            _assign_inside(value, made, _DEPTH)


def _assign_inside(holder: Any, made: Mapping[int, torch.Tensor], depth: int) -> None:
    if type(holder) not in (list, dict) or depth == 0:
        return
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if id(value) in made:
            holder[key] = made[id(value)]
        else:
            _assign_inside(value, made, depth - 1)


def _mark(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialisation leaves: what still holds it was not filled."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_marked(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    mark = _mark(tensor.dtype)
    found = torch.isnan(tensor) if mark != mark else tensor == mark
    return bool(found.all() if tensor.dtype == torch.bool else found.any())
