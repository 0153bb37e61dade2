"""Bound how long a rank waits for another one, where nobody said it: by the steps that were measured.

A backend waits as long for a step of a millisecond as for one of ten minutes (Gloo 30 minutes, NCCL 10). The longest
time from one step to the next says what is usual here, with the data loader, saves and evaluations in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from time import perf_counter

from autopar.runtime.ranks.process_groups import Known
from autopar.torch_compat import end_waits_after

TIMES, LEAST_S = 20, 600.0  # the longest that a step took; and never less, for what comes once: an evaluation, a save
EVERY = 10  # steps from one look to the next


class Patience:
    """The longest wait of one rank in groups of ours. bound: in seconds, None until enough steps were measured."""

    def __init__(self, groups: Iterable[Known] = ()) -> None:
        self._groups = list(groups)
        self._begun: float | None = None
        self._steps, self._longest = 0, 0.0
        self.bound: float | None = None

    def know(self, groups: Iterable[Known]) -> None:
        """Bound waits in these groups as well."""
        for group in groups:
            self._groups.append(group)
            if self.bound is not None:
                end_waits_after(timedelta(seconds=self.bound), group())

    def step(self, now: float | None = None) -> None:
        """A training step begins. now: the time, if not that of the clock."""
        now = perf_counter() if now is None else now
        if self._begun is not None:
            self._steps, self._longest = self._steps + 1, max(self._longest, now - self._begun)
        self._begun = now
        wanted = max(LEAST_S, TIMES * self._longest)
        if self._steps and self._steps % EVERY == 0 and wanted != self.bound:
            self.bound = wanted
            for group in self._groups:
                end_waits_after(timedelta(seconds=wanted), group())
