"""How does a module, with its loss, become one graph of a training step?"""

from autopar.capture.capture import Captured, LossFn, capture
from autopar.capture.inputs.batch_dims import dims_of_call
from autopar.capture.resizing.earlier import Earlier

__all__ = ["Captured", "Earlier", "LossFn", "capture", "dims_of_call"]
