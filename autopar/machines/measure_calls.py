"""Measure calls and transfers in a given time.

All ranks measure the same item at the same time, since in a training step they compute at the same time as well: they
share the cores of a host, and the power of its GPUs. Of a call the slowest rank counts, for which the others wait; of a
transfer the mean of the ranks, for all but the last have waited.

A step is a sum over many calls, so what counts is the mean of a call's times and not the least, which is luck: calls
run in batches, long enough to have in them what a machine does beside, and the median of their means counts, which a
burst of other work does not move. All items are gone through twice, so that such a burst spoils one of the rounds. Of
transfers the mean of all counts, but for such bursts: on a host most take their least time and some ten times that,
until a thread that waited has a core again, and each step has such ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from autopar.machines.samples import Item, MeasuredTransfer, Sample

ROUNDS = 2
BATCH_US = 20e3  # of calls between two looks at the clock
MOST_CALLS, LEAST_BATCHES, MOST_BATCHES = 2000, 2, 20
CALLS = 3 + LEAST_BATCHES  # of one item at least
BURST = 10  # times the median of batches: more than what transfers take now and then
TOO_LONG = 0.1  # of the time that is left: an item that needs more is left out

Run = Callable[[int], float]  # so many calls; the microseconds of one


class Meter(Protocol):
    """Runs what is measured."""

    def ready(self, item: Item) -> Run:
        """Make the operands of an item."""
        ...

    def launch_us(self) -> float:
        """What `Machine.launch_us` says, in us."""
        ...

    def host(self) -> tuple[float, float] | None:
        """What `Machine.to_host` and `Machine.host_update` say of this rank; None where cores are the devices."""
        ...


class Ranks(Protocol):
    """The processes that measure together."""

    def largest(self, value: float) -> float:
        """The largest of all ranks' values, on each of them."""
        ...

    def mean(self, value: float) -> float:
        """The mean of all ranks' values, on each of them."""
        ...


class Alone:
    """One process."""

    def largest(self, value: float) -> float:
        return value

    def mean(self, value: float) -> float:
        return value


def measure(
    items: Sequence[Item],
    runner: Meter,
    ranks: Ranks,
    seconds: float,
    told: Callable[[int, int, Item], None] = lambda done, total, item: None,
    now: Callable[[], float] = time.monotonic,
) -> list[Sample]:
    """Time each item, in about so many seconds; what would take too long is left out.

    Items of one family go from small to large. told: is called with the number of items that are done, of how
    many, and the next one. All ranks must call this with the same items.
    """
    found: dict[Item, list[float]] = {}
    alike: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for done, item, left_us in _queue(items, ranks, seconds, now):
        told(done, ROUNDS * len(items), item)
        smaller = alike.setdefault((done // len(items), *item.family), [])
        known = found.get(item)
        foreseen_us = statistics.median_low(known) if known else _foreseen_us(item, smaller)
        if CALLS * foreseen_us > TOO_LONG * left_us:
            continue
        share_us = left_us / (ROUNDS * len(items) - done)
        times = _times(item, runner, ranks, now() + share_us / 1e6, now)
        smaller.append((item.size, statistics.median_low(times)))
        found.setdefault(item, []).extend(times)
    return [Sample(item, _counts(item, times)) for item, times in found.items()]


def _counts(item: Item, times: Sequence[float]) -> float:
    """The time that counts: the mean of transfers without bursts, the median of calls."""
    median = statistics.median_low(times)
    return (
        statistics.fmean(us for us in times if us <= BURST * median) if isinstance(item, MeasuredTransfer) else median
    )


def _queue(
    items: Sequence[Item], ranks: Ranks, seconds: float, now: Callable[[], float]
) -> Iterator[tuple[int, Item, float]]:
    """Each item twice, with its number and the time that is left, in us, as all ranks agree."""
    end = now() + seconds
    for done, item in enumerate([*items] * ROUNDS):
        yield done, item, ranks.largest(max(0.0, end - now()) * 1e6)


def _foreseen_us(item: Item, smaller: Sequence[tuple[float, float]]) -> float:
    """On the line through the last two smaller ones, (size, us) each; 0 before there are two."""
    if len(smaller) < 2 or smaller[-1][0] >= item.size:
        return 0.0
    (size, us), (last, most) = smaller[-2:]
    return most + max(0.0, most - us) / (last - size) * (item.size - last)


def _times(item: Item, runner: Meter, ranks: Ranks, end: float, now: Callable[[], float]) -> list[float]:
    """The mean of each batch."""
    run = runner.ready(item)
    run(1)  # the first use finds kernels, memory and connections
    once = max(0.1, ranks.largest(min(_lasts_us(run, now), _lasts_us(run, now))))
    left_us = ranks.largest((end - now()) * 1e6)
    calls = int(min(MOST_CALLS, max(1.0, min(BATCH_US, left_us / LEAST_BATCHES) / once)))
    batches = int(min(MOST_BATCHES, max(LEAST_BATCHES, left_us / once / calls)))
    together = ranks.mean if isinstance(item, MeasuredTransfer) else ranks.largest
    return [together(run(calls)) for _ in range(batches)]


def _lasts_us(run: Run, now: Callable[[], float]) -> float:
    """One call, with what comes before it."""
    begun = now()
    run(1)
    return (now() - begun) * 1e6
