"""Group calls into fused kernels: `facts`, `fits`, `groups`, `merge`, `again`, `write`, in this order."""

from autopar.passes.fuse.fuse import fuse, fused

__all__ = ["fuse", "fused"]
