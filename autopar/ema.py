"""An exponential moving average of a model's weights, in parts as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.inputs import tables
from autopar.errors import AutoparError
from autopar.torch_compat import local_of

Tensor = torch.Tensor


class EMA:
    """Averages of the parameters of a model: a = decay a + (1 - decay) p at each `update()`; the first copies them.

        ema = autopar.EMA(model, decay=0.999)
        for x, y in loader:
            model.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.applied():                     # the model has the averages here
            evaluate(model)

    These are the numbers of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, for any mesh and
    ZeRO stage, and for a plain module: each rank averages the parts that it holds, and nothing moves. decay: from 0 up
    to but not including 1. buffers: average floating-point buffers too; else `applied` leaves them as the model has
    them. Every rank calls `applied` and `state_dict`, as it does the same methods of the model.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, buffers: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise AutoparError(f"EMA(decay={decay!r}): write a number from 0 up to but not including 1, such as 0.999.")
        self.model, self.decay, self.updates, self._buffers = model, decay, 0, buffers
        self._averages: dict[str, Tensor] = {}
        self._is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the averages."""
        if self._is_applied:
            raise AutoparError("EMA.update() within EMA.applied(): the model has the averages there. Call it outside.")
        now = self._now()
        if not self._averages:
            self._averages = {name: tensor.detach().clone() for name, tensor in now.items()}
        else:
            for held, given in self._locals(now):
                held.lerp_(given, 1.0 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages, and its own weights back at the end."""
        self._check("applied")
        own = {name: tensor.detach().clone() for name, tensor in self._now().items()}
        self._write(self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._write(own)

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the parameters, and how many updates they are of. Tensors as the model has them:
        `torch.distributed.checkpoint` saves each rank's parts."""
        self._check("state_dict")
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages that `state_dict` gave, of this mesh or another one; whole tensors will do."""
        now, given = self._now(), state["averages"]
        missing, unknown = sorted(now.keys() - given.keys()), sorted(given.keys() - now.keys())
        if missing or unknown:
            raise AutoparError(
                f"EMA.load_state_dict: these are not averages of this model: missing {missing[:3]}, unknown "
                f"{unknown[:3]}."
            )
        averages = {name: tensor.detach().clone() for name, tensor in now.items()}
        for name, tensor in averages.items():
            if tensor.shape != given[name].shape:
                raise AutoparError(
                    f"EMA.load_state_dict: '{name}' has shape {list(given[name].shape)}, and the model's is "
                    f"{list(tensor.shape)}."
                )
            tensor.copy_(given[name])
        self._averages, self.updates = averages, int(state["updates"])

    def _check(self, call: str) -> None:
        if not self._averages:
            raise AutoparError(f"EMA.{call}() before the first update(): there are no averages yet.")

    def _now(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(tables.named_parameters(self.model))
        if self._buffers:
            found |= {name: one for name, one in tables.named_buffers(self.model) if one.is_floating_point()}
        return found

    def _locals(self, now: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The parts of averages and weights that this rank holds."""
        pairs = [(name, _part(self._averages[name]), _part(tensor.detach())) for name, tensor in now.items()]
        for name, held, given in pairs:
            if held.shape != given.shape:
                raise AutoparError(
                    f"EMA: this rank's part of '{name}' was {list(held.shape)} and is {list(given.shape)}."
                )
        return [(held, given) for _, held, given in pairs]

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._now().items():
            tensor.copy_(values[name])


def _part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor
