"""What a command line TARGET returns: all that a training run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import LossFn
from autopar.compiler import Choices, ScheduleLike, SequenceParallel, staging_of
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
    microbatches, schedule, stages, chunks, stage_memory: of a pipeline, as of `autopar.parallelize`.
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

    microbatches: int | None = None
    schedule: ScheduleLike = "1f1b"
    stages: Sequence[str] | None = None
    chunks: int | None = None
    stage_memory: int | None = None

    @property
    def choices(self) -> Choices:
        """What the job decides beside the mesh."""
        return Choices(
            sequence_parallel=self.sequence_parallel,
            specialize=self.specialize,
            microbatches=self.microbatches,
            staging=staging_of(self.schedule, self.stages, self.chunks, self.stage_memory),
        )

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """What it says of a pipeline, by the names that `autopar.parallelize` and `autopar.verify` give them."""
        names = ("microbatches", "schedule", "stages", "chunks", "stage_memory")
        return {name: getattr(self, name) for name in names}

    def batch_of(self, step: int) -> Any:
        """The batch of a step."""
        return self.batch if self.data is None else self.data(step)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over some parameters."""
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(chosen, lr=3e-4) if self.optimizer is None else self.optimizer(chosen)
