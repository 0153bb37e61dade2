"""List the parameters, buffers and plain tensors of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.constructs import Construct
from autopar.ir.program import Input


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of a module: tied ones once, with all their names."""

    entries: tuple[tuple[Input, torch.Tensor], ...]


def state_of(model: nn.Module, partners: Mapping[str, nn.Module] | None = None) -> State:
    """Parameters, buffers and plain tensor attributes of `model`, then those of its partners, by identity."""
    found: dict[int, tuple[str, list[str], torch.Tensor]] = {}
    for prefix, module in {"": model, **(partners or {})}.items():
        for kind, named in (
            ("parameter", module.named_parameters(prefix, remove_duplicate=False)),
            ("buffer", module.named_buffers(prefix, remove_duplicate=False)),
            ("constant", _tensor_attributes(module, prefix)),
        ):
            for name, tensor in named:
                found.setdefault(id(tensor), (kind, [], tensor))[1].append(name)
    return State(tuple((Input(kind, tuple(names)), tensor) for kind, names, tensor in found.values()))


def _tensor_attributes(model: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(prefix=prefix):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield (f"{path}.{name}" if path else name), value


def once_each(step: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name for each attribute: those of a module that is registered under two names have two, and to swap them
    twice would leave the first stand-in there when they are put back."""
    found: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        found.setdefault((id(step.get_submodule(path)), attribute), (name, value))
    return dict(found.values())


@contextmanager
def attributes(step: nn.Module, values: Mapping[str, torch.Tensor], replaced: dict[str, Any]) -> Iterator[None]:
    """Put other tensors in place of plain tensor attributes, for as long as the context lasts; `replaced` is given
    those that were replaced meanwhile."""
    saved = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = step.get_submodule(path)
        saved.append((name, owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for name, owner, attribute, value in saved:
            now = getattr(owner, attribute, None)
            if now is not values[name]:
                replaced[name] = now
            setattr(owner, attribute, value)


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a buffer must keep."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def buffer_fault(name: str, old: torch.Tensor, new: torch.Tensor) -> Construct | None:
    """What is wrong with the new value of a buffer."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
        return Construct(
            f"a buffer '{name}' of another form ({was} before the step, {now} after it)",
            "A program is compiled for one form: make the buffer of its full size in __init__ and write into a part of "
            "it, or pass it in with the batch.",
        )
    if new.requires_grad and not old.requires_grad:
        return Construct(
            f"a buffer '{name}' whose new value has a gradient",
            "Its graph is gone in the next step: write x.detach() into it, under torch.no_grad().",
        )
    return None
