"""Mixed precision: which op computes in which dtype, and the casts between them."""

from autopar.passes.precision.precision import precision

__all__ = ["precision"]
