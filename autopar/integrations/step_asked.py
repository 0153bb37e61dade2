"""What integrations share: how a model is made parallel, and what a folder of a library has no place for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.api import parallelize
from autopar.capture.capture import LossFn
from autopar.checkpoint.together import AllRanks
from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError
from autopar.parallel.module import ParallelModule


@dataclass(frozen=True, slots=True)
class StepAsked:
    """What `autopar.parallelize` is asked for, of each model that is prepared."""

    mesh: MeshLike
    loss_fn: LossFn | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def made(self, model: nn.Module, device: torch.device) -> ParallelModule:
        return parallelize(model, self.mesh, loss_fn=self.loss_fn, device=device, **self.options)


def rest_of(model: ParallelModule) -> list[Any]:
    """What a run goes on with beside weights and optimizers: where random numbers and the loss scale stand."""
    return [model.random_state.state_dict(), model.loss_scale and model.loss_scale.state_dict()]


def take_up(model: ParallelModule, rest: list[Any]) -> None:
    """Go on with what `rest_of` gave."""
    random, scale = rest
    model.random_state.load_state_dict(random)
    if scale is not None and model.loss_scale is not None:
        model.loss_scale.load_state_dict(scale)


def on_first(models: list[ParallelModule], write: Any, path: Any) -> None:
    """Let rank 0 write; all wait for it. An error there is one on every rank."""
    ranks = AllRanks.of(models)

    def work(_phase: Any) -> None:
        try:
            if ranks.rank == 0:
                write()
        except OSError as error:
            raise AutoparError(f"'{path}' cannot be written: {error}") from error

    ranks.together(work)
