"""Find the ranks for which the others wait: how long each works on its own in a step, beside those that do the same.

What a rank does between two exchanges is its own: its part of the step, the user's data loader, the optimizer. A rank
that is slow at these waits for nobody, and all others wait for it. Each training step tells its number in the exchange
that it makes anyway; ranks that are more than it has numbers make one more for each window. On a GPU the host's time
says nothing of the device's: a slow loader is seen, no slow device.

A rank is slow if it is so in all steps but one of a window, twice in a row: windows share no step, so that a burst of
other work on a machine is none. Ranks that share cores wait for them in turns, which is nobody's fault: not counted.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Hashable, Sequence

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.runtime.ranks.process_groups import default_group
from autopar.runtime.ranks.waits import Waits
from autopar.settings import Settings

_log = logging.getLogger("autopar")
SLOW = 1.3  # times the median
WINDOW = 6  # steps that are looked at together: a rank that gets slow within a window is named 11 to 17 steps later
LEAST_US = 1000  # that a rank is slower: less is noise
SILENT = 200  # steps until the same rank is named again


class Pace:
    """The pace of all ranks in training steps. waits: counts this rank's time in exchanges."""

    def __init__(self) -> None:
        self.waits = Waits(shares_cores=(Settings.read().local_world_size or 1) >= (os.cpu_count() or 1))
        self.begun = 0  # training steps of this rank
        self._mark: tuple[float, float] | None = None  # when the last step began, and the waits until then
        self._own_us = 0  # to be told
        self._alike: dict[Hashable, list[int]] = {}  # ranks that do the same
        self._names: list[str] = []
        self._seen: list[list[int]] = []  # of the window at hand, by rank
        self.window: list[int] = []  # of this rank alone, where ranks are too many to be told in each step
        self._steps, self._suspects = 0, frozenset[int]()
        self._named: dict[int, int] = {}  # ranks, with the step at which each was named

    def lie_over(self, mesh: Mesh) -> None:
        """Compare the ranks of a mesh from now on."""
        coords = list(mesh.coords())
        self._names = [",".join(f"{axis}={place}" for axis, place in coord.items()) for coord in coords]
        self._alike = {}
        for rank, coord in enumerate(coords):  # stages of a pipeline do different things
            self._alike.setdefault(coord.get(PIPELINE, 0), []).append(rank)
        self._seen = [[] for _ in coords]

    def begin(self) -> None:
        """A training step begins."""
        self.begun += 1
        now, waited = self.waits.clock(), self.waits.seconds
        if self._mark is not None:
            self._own_us = max(1, int(1e6 * (now - self._mark[0] - waited + self._mark[1])))
        self._mark = now, waited

    def told(self, room: int) -> list[int]:
        """What this rank tells in an exchange that takes the highest of each of `room` numbers."""
        numbers = [0] * room
        if self._own_us and len(self._seen) <= room and self._seen:
            numbers[default_group().rank()] = self._own_us
        return numbers

    def heard(self, numbers: Sequence[int]) -> None:
        """Take what all ranks told; rank 0 names those that are slow."""
        own, self._own_us = self._own_us, 0
        if not own:
            return
        if len(numbers) < len(self._seen):
            self.window.append(own)
            return
        if default_group().rank() or not all(numbers[: len(self._seen)]):
            return
        for seen, number in zip(self._seen, numbers, strict=False):
            seen.append(number)
        self._steps += 1
        if self._steps % WINDOW == 0:
            self._look()
            self._seen = [[] for _ in self._seen]

    @property
    def is_due(self) -> bool:
        """Whether ranks tell each other of a window now: on all ranks at the same step."""
        return len(self.window) == WINDOW

    def heard_windows(self, windows: Sequence[list[int]]) -> None:
        """Take what each rank did in a window; rank 0 names those that are slow."""
        self.window = []
        if default_group().rank() == 0:
            self._seen, self._steps = list(windows), self._steps + WINDOW
            self._look()

    def _look(self) -> None:
        """Name the ranks that are slow in two windows in a row."""
        own = [statistics.median(seen) for seen in self._seen]
        least = [sorted(seen)[1] for seen in self._seen]  # of all steps but one
        found: dict[int, float] = {}
        for ranks in self._alike.values():
            usual = statistics.median_low([own[rank] for rank in ranks])
            found.update((r, usual) for r in ranks if least[r] >= SLOW * usual and least[r] - usual >= LEAST_US)
        for rank in found.keys() & self._suspects:
            if self._steps - self._named.get(rank, -SILENT) >= SILENT:
                self._named[rank] = self._steps
                _log.warning("%s", _text(rank, self._names[rank], own[rank], found[rank]))
        self._suspects = frozenset(found)


def _text(rank: int, name: str, own: float, usual: float) -> str:
    return (
        f"rank {rank} ({name}) is slow, and all others wait for it: it works {own / 1e3:.1f} ms a step on its own, "
        f"{own / usual:.2f} times the median of the ranks that do the same ({usual / 1e3:.1f} ms). Look at its data "
        f"loader, and for other work or less speed on its machine."
    )
