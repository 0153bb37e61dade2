"""What a checkpoint is of: models, optimizers, schedulers and loaders, under the names that the user gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.capture.inputs import tables
from autopar.errors import CheckpointError
from autopar.parallel.module import ParallelModule
from autopar.parallel.tensors.placed import PlacedTensor, placed


@dataclass(frozen=True, slots=True)
class Run:
    """The objects of a run, by name. One that was given alone is named for what it is: "model", "optimizer"."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any]
    loaders: Mapping[str, Any]

    @staticmethod
    def of(model: Any, optimizer: Any = None, scheduler: Any = None, loader: Any = None) -> Run:
        """What the user gave, checked. Raises CheckpointError."""
        models = _named("model", model)
        for name, each in models.items():
            if not isinstance(each, nn.Module):
                raise CheckpointError(f"{name} is {_kind(each)}: give an nn.Module, or a dict of them by name.")
        optimizers = _named("optimizer", optimizer)
        for name, each in optimizers.items():
            if not isinstance(each, Optimizer):
                raise CheckpointError(f"{name} is {_kind(each)}: give a torch optimizer, or a dict of them by name.")
        run = Run(models, optimizers, _named("scheduler", scheduler), _named("loader", loader))
        for name, each in (*run.schedulers.items(), *run.loaders.items()):
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise CheckpointError(
                    f"{name} is {_kind(each)}, without state_dict() and load_state_dict(): give an object that has "
                    f"them, or keep what it needs in extra=."
                )
        return run

    def names_of_parameters(self, optimizer: str) -> list[list[str]]:
        """The names of the parameters in each group of an optimizer. Raises CheckpointError for one of no model."""
        names = {
            id(parameter): f"{label}/{name}"
            for label, model in self.models.items()
            for name, parameter in tables.named_parameters(plain(model))
        }
        groups = []
        for at, group in enumerate(self.optimizers[optimizer].param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"{optimizer} has a parameter of shape {list(parameter.shape)} (group {at}, number {index}) "
                        f"that is of none of the models {', '.join(self.models)}: give its module as well, "
                        f"model={{'model': model, 'other': other}}; nn.ParameterList([parameter]) is one."
                    )
            groups.append([names[id(parameter)] for parameter in group["params"]])
        return groups

    def settle(self) -> None:
        """Let states that torch's loaders made, DTensors of its own, lie as some layout of the model says. Every rank
        must call it."""
        for optimizer in self.optimizers.values():
            for parameter, states in optimizer.state.items():
                if not isinstance(parameter, PlacedTensor):
                    continue
                for key, value in states.items():
                    if isinstance(value, DTensor) and not isinstance(value, PlacedTensor):
                        states[key] = placed(value, parameter)


def plain(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.original if isinstance(model, ParallelModule) else model


def state_of_module(model: nn.Module) -> dict[str, Any]:
    """Parameters, persistent buffers and extra states by name: the very tensors, tied ones under all their names."""
    found: dict[str, Any] = nn.Module.state_dict(plain(model), keep_vars=True)
    return found


def _named(label: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {label: given}
    for name in named:
        if not isinstance(name, str) or not name or "/" in name:
            raise CheckpointError(f"{label}: a name in the dict is {name!r}; write a text without '/'.")
    return dict(named)


def _kind(value: Any) -> str:
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
