"""`Job`: all that a training run needs, as a command line TARGET returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import LossFn
from autopar.compiler.check_options import CHECK_EVERY, Graphs, OnNonFinite
from autopar.ir.options import StepOptions


@dataclass(frozen=True)
class Job(StepOptions):
    """A model to train, and how its step is computed (`StepOptions`).

    batch: an example: a tuple of the arguments after the model, a dict of keyword arguments, or one tensor.
    optimizer: makes one from the parameters; AdamW by default.
    data: the batch of a step (global); by default the example at every step.
    cuda_graphs, check_replicas, on_nonfinite, timeout: as of `autopar.parallelize`.
    after: called with the trained module on every rank; rank 0 shows the text that it returns.
    """

    model: nn.Module
    loss_fn: LossFn | None = None
    batch: Any = ()
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    data: Callable[[int], Any] | None = None
    after: Callable[[nn.Module], str | None] | None = None

    cuda_graphs: Graphs = False
    check_replicas: int | None = CHECK_EVERY
    on_nonfinite: OnNonFinite | None = None
    timeout: float | None = None

    def batch_of(self, step: int) -> Any:
        """The batch of a step."""
        return self.batch if self.data is None else self.data(step)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over some parameters."""
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(chosen, lr=3e-4) if self.optimizer is None else self.optimizer(chosen)
