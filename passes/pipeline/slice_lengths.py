"""slice_lengths: how long each slice of a sequence should be, so that a pipeline does not wait for the slowest one.

Slices of equal length are no equal work: the later ones attend to more. Lengths are multiples of a unit; below `time`
is the time of a slice, by the unit at which it begins and the one before which it ends.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from autopar.ir.schedule import Costs, slice_us

Time = Callable[[int, int], float]
GRAIN = 16  # positions: what matrix units of GPUs and flash attention like
MOST = 128  # units of a sequence, so that the programme takes no second


def equal_work(time: Time, units: int, slices: int) -> tuple[int, ...]:
    """Slices that take equally long, each but for a unit's time (Seq1F1B, arXiv 2406.03488, section 3.3).

    Cut i stands where i / slices of the whole time is nearest, with a unit or more in each slice.
    """
    whole, cuts = time(0, units), [0]
    for place in range(1, slices):
        first, last = cuts[-1] + 1, units - (slices - place)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(time(0, cut) - whole * place / slices)))
    return _lengths(cuts, units)


def terapipe(time: Time, units: int, slices: int, ranks: int, sequences: int = 1) -> tuple[int, ...]:
    """Slices that end soonest where all forwards go before all backwards: the least of
    sequences * sum(t_i) + (ranks - 1) * max(t_i), by TeraPipe's dynamic programme (arXiv 2102.07988, section 3.3)."""
    table = [[time(start, stop) if start < stop else math.inf for stop in range(units + 1)] for start in range(units)]
    limits = sorted({t for row in table for t in row if t < math.inf})
    least, _ = _least_sum(table, units, slices, math.inf)
    first = bisect.bisect_left(limits, True, key=lambda limit: _least_sum(table, units, slices, limit)[0] < math.inf)
    best, lengths = math.inf, tuple[int, ...]()
    for longest in limits[first:]:
        if sequences * least + (ranks - 1) * longest >= best:
            break  # as TeraPipe does: a longer one gains nothing
        total, cuts = _least_sum(table, units, slices, longest)
        if sequences * total + (ranks - 1) * longest < best:
            best, lengths = sequences * total + (ranks - 1) * longest, _lengths(cuts, units)
    return lengths


def _least_sum(table: Sequence[Sequence[float]], units: int, slices: int, longest: float) -> tuple[float, list[int]]:
    """The least sum of times of slices none of which takes longer than `longest`, and where the slices begin."""
    none: tuple[float, list[int]] = (math.inf, [])
    sums = [(0.0, list[int]()), *[none] * units]
    for _ in range(slices):
        sums = [
            min(
                ((sums[start][0] + table[start][stop], [*sums[start][1], start]) for start in range(stop)
                 if table[start][stop] <= longest and sums[start][0] < math.inf),
                default=none,
            )
            for stop in range(units + 1)
        ]  # fmt: skip
    return sums[units]


def _lengths(cuts: Sequence[int], units: int) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in zip(cuts, [*cuts[1:], units], strict=True))


def time_of(costs: Costs, units: int) -> Time:
    """The time of a slice on the slowest stage, forward and backward, by the costs of a mean slice."""
    stages = {stage for stage, kind in costs.times_us if kind in "FBIW"}
    sums = {
        stage: [sum(times.get((stage, kind), 0.0) for kind in "FBIW") for times in (costs.times_us, costs.growing_us)]
        for stage in stages
    }
    whole, growing = max(sums.values(), default=[0.0, 0.0])
    return lambda start, stop: slice_us(whole - growing, growing, start / units, (stop - start) / units) * costs.slices


def grain_of(unit: int, positions: int, slices: int) -> int:
    """The positions that lengths are multiples of: what the layouts need, and of 16 unless the slices are short."""
    coarse = math.lcm(unit, GRAIN)
    grain = coarse if positions % coarse == 0 and positions // slices >= 4 * coarse else unit
    while positions // grain > MOST and positions % (2 * grain) == 0:
        grain *= 2
    return grain
