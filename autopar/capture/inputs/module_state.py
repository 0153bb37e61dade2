"""List the parameters, buffers and plain tensors of a module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.program import Input
from autopar.torch_compat import FakeTensorMode


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of a module: tied ones once, with all their names."""

    entries: tuple[tuple[Input, torch.Tensor], ...]


def state_of(model: nn.Module, partners: Mapping[str, nn.Module] | None = None) -> State:
    """Parameters, buffers and plain tensor attributes of `model`, then those of its partners, by identity."""
    tensors: dict[int, tuple[str, list[str], torch.Tensor]] = {}
    for prefix, module in {"": model, **(partners or {})}.items():
        for kind, named in (
            ("parameter", tables.named_parameters(module, prefix, remove_duplicate=False)),
            ("buffer", tables.named_buffers(module, prefix, remove_duplicate=False)),
            ("constant", _tensor_attributes(module, prefix)),
        ):
            for name, tensor in named:
                tensors.setdefault(id(tensor), (kind, [], tensor))[1].append(name)
    return State(tuple((Input(kind, tuple(names)), tensor) for kind, names, tensor in tensors.values()))


def _tensor_attributes(model: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in tables.named_modules(model, prefix=prefix):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                yield (f"{path}.{name}" if path else name), value


def once_each(step: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name for each attribute: those of a module that is registered under two names have two, and to swap them
    twice would leave the first stand-in there when they are put back."""
    tensors: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        tensors.setdefault((id(tables.submodule(step, path)), attribute), (name, value))
    return dict(tensors.values())


@contextmanager
def attributes(step: nn.Module, values: Mapping[str, torch.Tensor], replaced: dict[str, Any]) -> Iterator[None]:
    """Put other tensors in place of plain tensor attributes, for as long as the context lasts; `replaced` is given
    those that were replaced meanwhile."""
    saved = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = tables.submodule(step, path)
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


@contextmanager
def unmoved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave modules where they are that are moved while they run (`self.expert.to(x.device)`), as long as the context
    lasts: a program names no device, and their tensors are stand-ins. Another dtype is refused."""
    found = [module for module in modules if "_apply" not in vars(module)]
    for module in found:
        vars(module)["_apply"] = functools.partial(_moved, module)
    try:
        yield
    finally:
        for module in found:
            del vars(module)["_apply"]


def _moved(module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which `to`, `cuda`, `float` and the like call."""
    for name, tensor in (*tables.named_parameters(module, "", recurse), *tables.named_buffers(module, "", recurse)):
        dtype = move(tensor.detach()).dtype
        if dtype != tensor.dtype:
            was, now = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
            construct = Construct(
                f"a move of '{name}' of a {type(module).__name__} from {was} to {now} while the model runs",
                "A compiled step changes no weights: convert the module before autopar takes it, or the input to the "
                "dtype of the weights (x.to(weight.dtype)).",
            )
            raise refusal(construct, user_frame(sys._getframe(1)))
    return module


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    for parameter in tables.parameters(model):
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def fakes_of(
    given: Iterable[tuple[Input, torch.Tensor | None]], fake: FakeTensorMode, device: torch.device
) -> list[torch.Tensor]:
    """Tensors without data for the inputs of a step; given: what each stands for, None of the scale and the seed."""
    forms: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {"scale": ((), None), "seed": ((2,), torch.int64)}
    fakes = []
    with fake:
        for entry, tensor in given:
            if tensor is None:
                shape, dtype = forms[entry.kind]
                fakes.append(torch.empty(shape, dtype=dtype, device=device))
            else:
                fakes.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
    return fakes
