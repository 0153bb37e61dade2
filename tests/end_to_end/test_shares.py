"""The share of a cross product that `make test` runs: all pairs of values are in it, and little else."""

from __future__ import annotations

import itertools

import pytest
from shares import covering, pairs


@pytest.mark.parametrize("sizes", [(4, 3), (2, 2, 2), (4, 2, 4), (2, 5, 2, 4, 2), (3, 1, 3), (3, 3, 3, 3)], ids=str)
def test_any_two_values_of_unlike_kinds_come_together(sizes: tuple[int, ...]) -> None:
    chosen = covering(sizes)
    for (i, size), (j, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(places[i], places[j]) for places in chosen} == set(itertools.product(range(size), range(other)))
    *_, second, first = sorted(sizes)
    assert len(chosen) <= 1.8 * first * second, "of as many the two longest kinds have pairs"


def test_the_others_are_slow_and_none_is_lost() -> None:
    made = list(pairs("abcd", (2, 3), (None, True, False)))
    assert [each.values for each in made] == list(itertools.product("abcd", (2, 3), (None, True, False)))
    quick = [each.values for each in made if not each.marks]
    assert len(quick) == len(covering((4, 2, 3))) < len(made)
    assert {mark.name for each in made for mark in each.marks} == {"slow"}
