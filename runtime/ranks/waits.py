"""How long a rank waits for others, by a clock that stands still while it waits for a core.

Ranks that share cores wait for them in turns. Such a wait may lie in an exchange or between two: by this clock it lies
in neither, so that what is left of a step is the rank's own, and never less than nothing.
"""

from __future__ import annotations

import os
import threading
from io import FileIO
from time import perf_counter

_BYTES = 64  # of three numbers: ns on a core, ns that it waited for one, turns


class Waits:
    """seconds: of a rank in exchanges with others, in all: what it sent, and what it waited for. shares_cores: True if
    there are no more cores than ranks on its machine."""

    def __init__(self, shares_cores: bool = False) -> None:
        self.seconds = 0.0
        self._shares_cores = shares_cores
        self._of_thread = threading.local()

    def clock(self) -> float:
        """Seconds, without those in which this thread waited for a core that others had."""
        return perf_counter() - self.queued() if self._shares_cores else perf_counter()

    def queued(self) -> float:
        """Seconds for which this thread has waited for a core; 0 where the system does not say (/proc of Linux)."""
        try:
            file: FileIO = self._of_thread.__dict__.get("file") or self._opened()
            return int(os.pread(file.fileno(), _BYTES, 0).split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def _opened(self) -> FileIO:
        file = self._of_thread.file = FileIO("/proc/thread-self/schedstat")
        return file
