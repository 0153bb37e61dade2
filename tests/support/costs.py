"""What each test costs, as measured, and which cases of a dear one `make test` runs: `make test-all` has them all.

    make costs      # all tests but the slow ones, and their rows of tests/costs.csv anew

A function of tests may take BUDGET in `make test`. Of one whose cases take more, as many run as the budget pays for:
each time the case with the most values and pairs of values of its parameters that none before it has, so that a small
table of options keeps each option. Among equals a hash of the name decides, as a case that is new then moves no other.
"""

from __future__ import annotations

import csv
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

COSTS = Path(__file__).resolve().parent.parent / "costs.csv"
BUDGET = 1.0  # CPU seconds of the reference day (benchmarks/yardstick.py) for all cases of a function of tests
HEADER = ("test", "cases", "seconds")


@dataclass(frozen=True, slots=True)
class Cost:
    """What the cases of a function of tests took together, in CPU seconds, with the ranks that they started."""

    cases: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cases + other.cases, self.seconds + other.seconds)

    def affordable(self) -> int:
        """How many cases the budget pays for: one at least."""
        return max(1, int(BUDGET * self.cases / self.seconds))


def read_costs(path: Path = COSTS) -> dict[str, Cost]:
    with path.open(newline="") as file:
        return {row["test"]: Cost(int(row["cases"]), float(row["seconds"])) for row in csv.DictReader(file)}


def write_costs(costs: Mapping[str, Cost], path: Path = COSTS) -> None:
    """Keep those that the budget does not pay for: all others run whole. Of tests that did not run the rows stay."""
    costs = {**(read_costs(path) if path.exists() else {}), **costs}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for test, cost in sorted(costs.items()):
            if cost.cases > 1 and cost.seconds >= BUDGET:
                writer.writerow((test, cost.cases, f"{cost.seconds:.2f}"))


def function_of(name: str) -> str:
    """Take the case off the name of a test."""
    return name.partition("[")[0]


def beyond_budget(items: Iterable[pytest.Item], costs: Mapping[str, Cost]) -> list[pytest.Item]:
    """Find the cases that the budget of their functions does not pay for."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if function_of(item.nodeid) in costs and not item.get_closest_marker("slow"):
            cases[function_of(item.nodeid)].append(item)
    beyond = list[pytest.Item]()
    for function, found in cases.items():
        if len(found) > (most := costs[function].affordable()):
            kept = set(spread({item.nodeid: _values(item) for item in found}, most))
            beyond += [item for item in found if item.nodeid not in kept]
    return beyond


def spread(cases: Mapping[str, Mapping[str, int]], most: int) -> list[str]:
    """Choose cases, by their names, in which many values of the parameters and many pairs of them occur."""
    order = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    left = {name: _pairs(cases[name]) for name in order}
    seen, chosen = set[object](), list[str]()
    while left and len(chosen) < most:
        name = max(left, key=lambda each: len(left[each] - seen))
        seen |= left.pop(name)
        chosen.append(name)
    return chosen


def _values(item: pytest.Item) -> Mapping[str, int]:
    """The place of each parameter's value among those of its list."""
    return item.callspec.indices if hasattr(item, "callspec") else {}


def _pairs(values: Mapping[str, int]) -> set[object]:
    return {*values.items(), *itertools.combinations(sorted(values.items()), 2)}
