"""A share of many combinations for `make test`, in which every value occurs; the others are for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def share(every: int, *values: Iterable[Any]) -> Iterator[Any]:
    """All combinations of some values as parameters of a test, of which one in `every` is not slow.

    These are a diagonal, in which each value occurs if there are `every` or more of another kind."""
    for numbered in itertools.product(*(list(enumerate(each)) for each in values)):
        marks = () if sum(number for number, _ in numbered) % every == 0 else (pytest.mark.slow,)
        yield pytest.param(*(value for _, value in numbered), marks=marks)


def pairs(*values: Iterable[Any]) -> Iterator[Any]:
    """All combinations of some values as parameters of a test, of which those are not slow that `covering` names.

    For tests of what two options do to each other: three of them come together in `make test-all`."""
    kinds = [list(each) for each in values]
    quick = covering([len(each) for each in kinds])
    for places in itertools.product(*(range(len(each)) for each in kinds)):
        marks = () if places in quick else (pytest.mark.slow,)
        yield pytest.param(*(each[place] for each, place in zip(kinds, places, strict=True)), marks=marks)


def covering(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Choose few combinations of as many values of each kind, in which any two values of unlike kinds come together:
    each time the first one that has the most pairs which none before it has."""
    every = [(places, _pairs_of(places)) for places in itertools.product(*map(range, sizes))]
    missing, chosen = set().union(*(found for _, found in every)), set[tuple[int, ...]]()
    while missing:
        places, found = max(every, key=lambda each: len(each[1] & missing))
        missing -= found
        chosen.add(places)
    return chosen


def _pairs_of(places: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(places), 2))


def in_turns(cases: Iterable[Any], meshes: Sequence[str], every: int = 2) -> Iterator[Any]:
    """(case, meshes): with each case one of `every` meshes, by turns, and as a slow parameter the others."""
    for i, case in enumerate(cases):
        quick = tuple(mesh for j, mesh in enumerate(meshes) if (i + j) % every == 0)
        others = tuple(mesh for mesh in meshes if mesh not in quick)
        name = getattr(case, "__name__", case)
        yield pytest.param(case, quick, id=str(name))
        yield pytest.param(case, others, id=f"{name}, other meshes", marks=pytest.mark.slow)
