"""What a command line TARGET returns: all that a training run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import LossFn
from autopar.compiler import SequenceParallel
from autopar.execution import Compiler


@dataclass(frozen=True)
class Job:
    """A model to train.

    batch: an example: a tuple of the arguments after the model, a dict of keyword arguments, or one tensor.
    optimizer: makes one from the parameters; AdamW by default.
    data: the batch of a step (global); by default the example at every step.
    sequence_parallel: True, False or "auto", as of `autopar.parallelize`.
    compile: "inductor" or None, as of `autopar.parallelize`.
    specialize: True or False, as of `autopar.parallelize`.
    after: called with the trained module on every rank; rank 0 shows the text that it returns.
    """

    model: nn.Module
    loss_fn: LossFn | None = None
    batch: Any = ()
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    data: Callable[[int], Any] | None = None
    after: Callable[[nn.Module], str | None] | None = None

    sequence_parallel: SequenceParallel = False
    compile: Compiler | None = None
    specialize: bool = False

    def batch_of(self, step: int) -> Any:
        """The batch of a step."""
        return self.batch if self.data is None else self.data(step)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over some parameters."""
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(chosen, lr=3e-4) if self.optimizer is None else self.optimizer(chosen)
