"""What a captured step is to give."""

from __future__ import annotations

from enum import Enum


class StepKind(Enum):
    """What a step gives: the loss and its gradients, the loss alone, or what the model itself returns."""

    TRAINING = "training"
    LOSS = "loss"
    OUTPUT = "output"

    @property
    def gives_loss(self) -> bool:
        """Whether the step is of the loss function, or of a model that gives its loss itself."""
        return self is not StepKind.OUTPUT

    @property
    def trains(self) -> bool:
        """Whether it gives gradients."""
        return self is StepKind.TRAINING
