"""How long slices of sequences are: equal work, TeraPipe's programme, and what they win."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from test_sliced_schedules import chain, orders

from autopar.ir.schedule import Action, Costs
from autopar.passes.pipeline.slice_lengths import Time, equal_work, grain_of, terapipe, time_of
from autopar.passes.schedules import simulate, with_transfers


def attending(share: float, units: int, slices: int = 1) -> Time:
    """The times of slices of a sequence that takes 3; of one part of it the pairs of causal attention are `share`."""
    costs = Costs({(0, "F"): 1.0 / slices, (0, "B"): 2.0 / slices}, slices=slices)
    growing = {key: share * time for key, time in costs.times_us.items()}
    return time_of(replace(costs, growing_us=growing), units)


def ended(time: Time, lengths: tuple[int, ...]) -> list[float]:
    """The time of each slice."""
    stops = list(itertools.accumulate(lengths))
    return [time(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def compositions(units: int, slices: int) -> list[tuple[int, ...]]:
    """All ways to cut so many units into so many slices."""
    cuts = (itertools.pairwise((0, *some, units)) for some in itertools.combinations(range(1, units), slices - 1))
    return [tuple(stop - start for start, stop in pairs) for pairs in cuts]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_slices_of_equal_work_differ_by_a_unit(share: float, slices: int) -> None:
    for units in (slices, 24, 64, 128):
        time = attending(share, units, slices)
        found = equal_work(time, units, slices)
        assert sum(found) == units and len(found) == slices and min(found) >= 1
        mean, unit = time(0, units) / slices, time(units - 1, units)
        if units > 4 * slices:
            assert all(abs(each - mean) <= unit for each in ended(time, found)), (units, found)
    assert time(0, units) == pytest.approx(3.0)


def test_without_attention_slices_are_equal() -> None:
    assert equal_work(attending(0.0, 64, 4), 64, 4) == (16,) * 4
    assert terapipe(attending(0.0, 64, 4), 64, 4, ranks=4) == (16,) * 4


def test_terapipe_is_the_best_of_all() -> None:
    """Of any times, such as those of calls that have a least time, against all ways to cut."""
    draw = random.Random(0)
    for _ in range(40):
        units, slices, ranks, sequences = (draw.randint(*ends) for ends in ((4, 9), (1, 4), (1, 6), (1, 3)))
        table = {(i, j): draw.uniform(0.1, 1.0) * (j - i) for i in range(units) for j in range(i + 1, units + 1)}

        def goal(lengths: tuple[int, ...], time: Time = lambda *at, table=table: table[at], m: int = sequences,
                 p: int = ranks) -> float:  # fmt: skip
            times = ended(time, lengths)
            return m * sum(times) + (p - 1) * max(times)

        found = terapipe(lambda start, stop, table=table: table[start, stop], units, slices, ranks, sequences)
        assert goal(found) == pytest.approx(min(map(goal, compositions(units, slices))), abs=1e-12)


def test_what_lengths_are_multiples_of() -> None:
    assert grain_of(1, 1024, 4) == 16 and grain_of(4, 1024, 4) == 16 and grain_of(24, 3072, 4) == 48
    assert grain_of(1, 24, 4) == 1 and grain_of(4, 128, 4) == 4  # short
    assert grain_of(1, 1025, 5) == 1 and 1025 % grain_of(5, 1025, 5) == 0
    assert grain_of(1, 2**17, 8) == 1024  # long: what the programme goes through in no time


def idle(p: int, m: int, k: int, share: float, name: str = "seq1f1b") -> tuple[float, float]:
    """The share of a step in which a rank does nothing: with slices of equal length, and of equal work."""
    times = {(s, kind): t / k for s in range(p) for kind, t in (("F", 1.0), ("B", 2.0))}
    costs = Costs(times, growing_us={key: share * time for key, time in times.items()}, slices=k)
    flow, found = chain(tuple(range(p)), m, k), []
    for lengths in ((), equal_work(time_of(costs, 128), 128, k)):
        spent = costs.with_lengths(lengths)
        timeline = simulate(with_transfers(orders(name, p, m, k), flow, spent), flow, spent)
        found.append(1 - m * 3.0 / timeline.span_us)
    return found[0], found[1]


def test_slices_of_equal_work_leave_less_idle() -> None:
    """With attention 60 % of the work four slices of equal length are worse than none (27.3 %); of equal work they
    leave nearly what slices of equal time do: (p - 1) / (m k + p - 1)."""
    assert [round(100 * each, 1) for each in idle(4, 8, 4, 0.6)] == [34.6, 9.9]
    for p, m, k in [(4, 8, 8), (8, 8, 4), (2, 1, 4)]:
        equal, chosen = idle(p, m, k, 0.6)
        assert chosen < equal and chosen == pytest.approx((p - 1) / (m * k + p - 1), abs=0.03), (p, m, k)
    assert idle(4, 4, 4, 0.6, "gpipe")[1] < idle(4, 4, 4, 0.6, "gpipe")[0]


def test_times_of_slices_add_up() -> None:
    """Whatever the lengths; equal ones are told as before."""
    costs = Costs({(0, "F"): 2.0}, growing_us={(0, "F"): 1.2}, slices=4)
    for lengths in ((8, 8, 8, 8), (14, 8, 6, 4), (1, 1, 1, 29)):
        times = [costs.with_lengths(lengths).time_us(Action(0, "F", part)) for part in range(8)]
        assert sum(times) == pytest.approx(2 * 4 * 2.0) and times[:4] == times[4:]
    equal = [costs.time_us(Action(0, "F", part)) for part in range(4)]
    assert [costs.with_lengths((8,) * 4).time_us(Action(0, "F", part)) for part in range(4)] == pytest.approx(equal)
