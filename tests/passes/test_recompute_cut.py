"""The minimum cuts against all choices there are, on small random problems; and budgets over many layers."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.passes.recompute.min_cut import CutChoice, CutValue, LayerProblem, frontier, least, nothing_again


def problem(seed: int) -> LayerProblem:
    """Seven calls, some of which may not be computed again, each with one or two results and up to two operands."""
    draw = random.Random(seed)
    times, reads, values = [], [], []
    for call in range(7):
        times.append(None if draw.random() < 0.3 else draw.randint(1, 9))
        reads.append(tuple(sorted(draw.sample(range(len(values)), min(len(values), draw.randint(0, 2))))))
        for _ in range(draw.randint(1, 2)):
            values.append(CutValue(call, draw.randint(1, 9), draw.random() < 0.5))
    return LayerProblem(tuple(times), tuple(reads), tuple(values))


def bytes_of(given: LayerProblem, again: tuple[int, ...]) -> int:
    """What has to be kept if some calls are computed again."""
    needed = {i for i, value in enumerate(given.values) if value.needed}
    needed |= {value for call in again for value in given.reads[call]}
    return sum(given.values[i].bytes_ for i in needed if given.values[i].call not in again)


def choices(given: LayerProblem) -> list[CutChoice]:
    free = [call for call, time in enumerate(given.times) if time is not None]
    return [
        CutChoice(bytes_of(given, again), sum(given.times[call] or 0 for call in again), again)
        for count in range(len(free) + 1)
        for again in itertools.combinations(free, count)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_the_best_of_all_choices(seed: int) -> None:
    given = problem(seed)
    every = choices(given)
    best = min(every, key=lambda point: (point.bytes_, point.time))
    found = least(given)
    assert (found.bytes_, found.time) == (best.bytes_, best.time)
    assert found.bytes_ == bytes_of(given, found.again)
    points = frontier(given)
    assert points[0] == nothing_again(given) and points[-1].bytes_ == best.bytes_
    for before, after in itertools.pairwise(points):
        assert before.bytes_ > after.bytes_ and before.time < after.time
        price, weight = after.time - before.time, before.bytes_ - after.bytes_
        level = price * before.bytes_ + weight * before.time
        assert all(price * p.bytes_ + weight * p.time >= level for p in every), "a choice below the hull"
