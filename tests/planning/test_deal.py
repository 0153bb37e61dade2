"""Stages that are dealt out: the slowest is as fast as in any cut, and together they are the model."""

from __future__ import annotations

from functools import reduce
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.planning.space.deal import Section, Sections, whole

ENTRY, LAYER, BEHIND = [1.0, 0.5], [2.0, 5.0, 1.0, 3.0], [0.5, 8.0, 2.0]


def section(times: list[float], crossing: list[float]) -> Section:
    time = np.concatenate([[0.0], np.cumsum(times)])
    return Section(time, time**2, 1.0 - np.exp(-time), np.array([*crossing, 0.0]))


def sections(crossing: float) -> Sections:
    """Sending costs `crossing` between layers, and twice as much inside of them."""
    inside = [crossing, *[2 * crossing] * 3]
    return Sections(section(ENTRY, [0.0, crossing]), section(LAYER, inside), section(BEHIND, [crossing] * 3))


@pytest.mark.parametrize("crossing", [0.0, 0.4])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_slowest_stage_is_as_fast_as_in_any_cut(count: int, crossing: float) -> None:
    layers, model = 3, sections(crossing)
    shares = model.stages(layers, count)
    calls = [*ENTRY, *LAYER * layers, *BEHIND]
    sent = [0.0, crossing, *[crossing, *[2 * crossing] * 3] * layers, *[crossing] * 3, 0.0]

    def slowest(inner: tuple[int, ...]) -> float:
        ends = (0, *inner, len(calls))
        return max(sum(calls[a:b]) + sent[a] + sent[b] for a, b in pairwise(ends))

    best = min(slowest(inner) for inner in combinations(range(1, len(calls)), count - 1))
    took = [
        part.entry * sum(ENTRY) + part.layers * sum(LAYER) + part.behind * sum(BEHIND)
        for part in (share.time for share in shares)
    ]
    assert max(took) <= best * 1.01
    assert sum(took) == pytest.approx(sum(calls))


def test_all_stages_together_are_the_model() -> None:
    shares = sections(0.1).stages(4, 3)
    total, model = reduce(lambda a, b: a + b, shares), whole(4)
    for kind in ("time", "stored", "saved"):
        found, wanted = getattr(total, kind), getattr(model, kind)
        assert (found.entry, found.layers, found.behind) == pytest.approx((wanted.entry, wanted.layers, wanted.behind))
    assert shares[0].time.entry == shares[-1].time.behind == 1.0
    assert shares[0].stored != shares[0].time, "a layer that is cut has other parts of its parameters than of its time"


def test_the_ends_of_a_model_stand_for_no_cut() -> None:
    """Nothing crosses them, and a stage before or behind them has nothing."""
    short = section([0.1, 5.0, 0.1], [0.0, 0.4, 0.4])
    assert list(short.places) == [0, 1, 2]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_places_that_are_left_out_are_never_better(count: int) -> None:
    """Where three values cross, or nothing is computed since the place before, a cut is not looked at."""
    times, crossing, layers = [2.0, 0.3, 0.0, 5.0, 0.4, 3.0], [0.4, 1.2, 0.8, 0.8, 1.2, 0.7], 3
    model = Sections(section(ENTRY, [0.0, 0.4]), section(times, crossing), section(BEHIND, [0.4] * 3))
    assert list(model.layer.places) == [0, 2, 5], "places behind 2.0 and 0.3 + 0.0, and in the long call, are no better"
    shares = model.stages(layers, count)
    calls, sent = [*ENTRY, *times * layers, *BEHIND], [0.0, 0.4, *crossing * layers, *[0.4] * 3, 0.0]

    def took(inner: tuple[int, ...]) -> tuple[float, float, list[float]]:
        """The slowest stage, the squares of all, and what each computes."""
        pairs = list(pairwise((0, *inner, len(calls))))
        all_ = [sum(calls[a:b]) + sent[a] + sent[b] for a, b in pairs]
        return round(max(all_), 6), round(sum(us * us for us in all_), 6), [sum(calls[a:b]) for a, b in pairs]

    every = [took(inner) for inner in combinations(range(1, len(calls)), count - 1)]
    best = min(every)[:2]
    evenest = [alone for *cost, alone in every if tuple(cost) == best]
    parts = [share.time for share in shares]
    alone = [part.entry * sum(ENTRY) + part.layers * sum(times) + part.behind * sum(BEHIND) for part in parts]
    assert alone in [pytest.approx(best) for best in evenest]
