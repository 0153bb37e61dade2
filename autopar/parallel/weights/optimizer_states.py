"""Optimizer states that were made elsewhere: after a load, and before a step, they lie as their parameters do.

What `load_state_dict` takes over from a run on one device is plain, and whole on every rank; so is what an optimizer
makes before the first program decides layouts. Steps would be right with it, but the memory is one device's. What torch
loads, or distributes itself, is a DTensor of its own, which on the ranks of other stages has no value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.errors import AutoparError, RankError
from autopar.parallel.agree.agreement import Agreement, UserCall
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.tensors.placed import PlacedTensor, placed, whole_value
from autopar.parallel.weights.store import ParameterStore
from autopar.torch_compat import before_steps, tree_map


class States:
    """Places the states of all optimizers of one model's parameters, each time that there are new ones.

    An optimizer is known from its first step on (torch's `set_optimizer_state_dict` makes one), and looked at after
    each load from then on.
    """

    def __init__(self, store: ParameterStore, agreement: Agreement, updating: Callable[[], None]) -> None:
        self._store, self._agreement, self._updating = store, agreement, updating
        self._seen: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()

    def watch(self, owner: object) -> None:
        """Look at each optimizer before its step, as long as `owner` lives."""
        before_steps(owner, self.place)

    def place(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        """Replace states that do not lie as their parameters. Every rank must call this with the same states.

        What is not the model's DTensor becomes one in any case; the rest once a program has decided layouts.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(p.grad is not None and self._store.is_ours(p) for p in parameters):
            self._updating()  # versions of parameters do not tell: fused optimizers leave them
        if self._seen.get(optimizer) is optimizer.state:  # loading makes another dict
            return
        if not any(self._store.is_ours(p) for group in optimizer.param_groups for p in group["params"]):
            return
        if self._store.is_placed and optimizer not in self._seen:
            optimizer.register_load_state_dict_post_hook(self.place)
        known = [(p, s) for p, s in optimizer.state.items() if self._store.is_ours(p)]
        quick = {p: bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
        for parameter, states in known:
            for key, value in states.items():
                if key != "step" or quick.get(parameter):  # else a number of the host's, as torch has it
                    states[key] = tree_map(partial(_moved, optimizer, key, parameter.device), value)
                if isinstance(value, DTensor) and not isinstance(value, PlacedTensor):
                    states[key] = placed(value, parameter)
        if not self._store.is_placed:
            return
        if optimizer.state:  # not made by the steps that follow
            self._check_options(optimizer)
        self._seen[optimizer] = optimizer.state
        found = [
            (states, key, value, parameter)
            for parameter, states in known
            if parameter.ndim > 0
            for key, value in states.items()
            if _is_elsewhere(value, parameter)
        ]
        plain = [value for _, _, value, _ in found if not isinstance(value, DTensor)]
        self._store.distributor.world.agree(f"{type(optimizer).__name__}.load_state_dict", plain)
        for states, key, value, parameter in found:
            whole = whole_value(value, key) if isinstance(value, PlacedTensor) else value.to(parameter.device)
            states[key] = parameter.around(parameter.place.part(whole.detach()), parameter.place, parameter.shape)

    def _check_options(self, optimizer: Optimizer) -> None:
        """Raise RankError on every rank if the options of groups differ, which a load gave to one rank alone."""
        what = f"parameter groups of {type(optimizer).__name__}"
        try:
            with self._agreement.called(UserCall(f"{type(optimizer).__name__}.step")):
                self._agreement.check(what, _options_of(optimizer))
        except RankError as error:
            if what not in str(error):  # ranks are in different calls
                raise
            raise RankError(
                f"{error} (torch's set_optimizer_state_dict(broadcast_from_rank0=True) gives options that an optimizer "
                f"has not yet, as a scheduler's initial_lr, to rank 0 alone: make the scheduler before it.)"
            ) from error


def _moved(optimizer: Optimizer, key: str, device: torch.device, value: Any) -> Any:
    """A state that was made where the plain model lay, on the device of the parallel one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.device == device:
        return value
    if value.device.type == "meta":
        raise AutoparError(
            f"the state '{key}' of {type(optimizer).__name__} is on the meta device, without values: this optimizer "
            f"makes states when it is made. Make it after autopar.parallelize."
        )
    return value.to(device)


def _options_of(optimizer: Optimizer) -> list[str]:
    """The options of an optimizer's groups, as ranks compare them."""
    return [
        f"group {at}: {len(group['params'])} parameters, {key}={value}"
        for at, group in enumerate(optimizer.param_groups)
        for key, value in sorted(group.items())
        if value is None or isinstance(value, (bool, int, float, str))
    ]


def _is_elsewhere(value: Any, parameter: ParameterTensor) -> bool:
    """Whether a state goes element by element with its parameter, but is whole on every rank or lies as the parameter
    did before the first program."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if isinstance(value, ParameterTensor):
        return value.place is not parameter.place
    return not isinstance(value, DTensor)
