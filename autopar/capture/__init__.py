"""From an nn.Module and a loss to one graph of a training step."""

from autopar.capture.capture import Captured, LossFn, capture
from autopar.capture.earlier import Earlier

__all__ = ["Captured", "Earlier", "LossFn", "capture"]
