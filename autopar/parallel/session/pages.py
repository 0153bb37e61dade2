"""Keep the pages of memory that a step on a CPU lets go of.

glibc gives the free end of its heap back to the system (mallopt(3), M_TRIM_THRESHOLD), and the next calls ask for the
same pages again: up to 16 % of a step (benchmarks/RESULTS.md). A step needs as much as the one before it, so what is
free stays with the process. Results of 32 MiB or more are mapped anew each time, as before.
"""

from __future__ import annotations

import ctypes
import sys

from autopar.machines.model import FRESH

# Of malloc.h. Saying the one ends that glibc finds the other by itself, which would have become FRESH at most.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER = -1


def keep_pages() -> None:
    """Have this process keep the memory that it frees. Does nothing where the C library is not glibc, or has been
    replaced (jemalloc, tcmalloc)."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_THRESHOLD, FRESH)
