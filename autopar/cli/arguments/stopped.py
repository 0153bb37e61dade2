"""How a command ends that the user stopped: known where a command line is read, which is before torch is imported."""

from __future__ import annotations

import os
import signal
import sys

from autopar.errors import AutoparError


class Stopped(AutoparError):
    """The user stopped the run by a signal, as Ctrl-C does."""

    def __init__(self, ranks: int, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; all {ranks} ranks were ended.")
        self.by = by

    def end(self) -> None:
        """End this process by the same signal: shells want to know, and torch's own end takes five seconds."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(self.by, signal.SIG_DFL)
        os.kill(os.getpid(), self.by)
