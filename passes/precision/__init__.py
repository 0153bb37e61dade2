"""Which op computes in which dtype under mixed precision, and where do casts stand?"""

from autopar.passes.precision.precision import precision

__all__ = ["precision"]
