"""Optimizer states that were made elsewhere: before a step they are split as their parameters are.

What `load_state_dict` takes over from a run on one device is plain, and whole on every rank; so is what an optimizer
makes before the first program decides layouts. Steps would be right with it, but the memory is one device's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar.parallel.parameter import ParameterTensor
from autopar.parallel.store import ParameterStore
from autopar.torch_compat import local_of


class States:
    """Splits the states of all optimizers of one model's parameters, each time that there are new ones."""

    def __init__(self, store: ParameterStore) -> None:
        self._store, self._world = store, store.distributor.world
        self._seen: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()

    def watch(self, owner: object) -> None:
        """Look at each optimizer before its step, as long as `owner` lives."""
        weakref.finalize(owner, register_optimizer_step_pre_hook(self.split).remove)

    def split(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        """Replace states that are whole. Every rank must call this with the same states."""
        if not self._store.is_placed or self._seen.get(optimizer) is optimizer.state:  # loading makes another dict
            return
        self._seen[optimizer] = optimizer.state
        found = [
            (states, key, value, parameter)
            for parameter, states in optimizer.state.items()
            if isinstance(parameter, ParameterTensor) and self._is_split(parameter)
            for key, value in states.items()
            if _is_whole(value, parameter)
        ]
        plain = [value for _, _, value, _ in found if not isinstance(value, DTensor)]
        self._world.agree(f"{type(optimizer).__name__}.load_state_dict", plain)
        for states, key, value, parameter in found:
            whole = local_of(value) if isinstance(value, DTensor) else value.to(parameter.device)
            states[key] = parameter.around(parameter.place.part(whole.detach()), parameter.place, parameter.shape)

    def _is_split(self, parameter: ParameterTensor) -> bool:
        place = parameter.place
        return parameter.ndim > 0 and place.world is self._world and not place.is_whole


def _is_whole(value: Any, parameter: ParameterTensor) -> bool:
    """Whether a state goes element by element with its parameter, and lies whole on every rank."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.place.is_whole if isinstance(value, ParameterTensor) else not isinstance(value, DTensor)
