"""Which calls become one kernel? `facts`, `fits`, `groups`, `fuse`, `again`, `write_groups`, in this order."""

from autopar.passes.fuse.fuse import fuse, fused

__all__ = ["fuse", "fused"]
