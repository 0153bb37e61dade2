"""From an nn.Module and a loss to one graph of a training step."""

from autopar.capture.capture import Captured, capture

__all__ = ["Captured", "capture"]
