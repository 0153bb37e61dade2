"""What `python -m benchmarks.planner` says of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner.__main__ import summary
from benchmarks.planner.configurations import configurations
from benchmarks.planner.measure import Row, quarter

ROWS = [
    Row("gpt dp=2", "gpt", predicted=1.0, measured=1.25, held=(100.0, 100.0)),
    Row("gpt tp=2", "gpt", predicted=1.1, measured=1.0, held=(102.0, 100.0)),
    Row("gpt pp=2", "gpt", refused="no"),
]


def test_errors_and_regret() -> None:
    """The choice is the first (1.0 s predicted), which takes a quarter longer than the second."""
    whole, choice = summary(ROWS)
    assert whole == ("2 ways, 1 refused: step time mean error 15.0%, largest 20.0% (gpt dp=2); memory largest 2.00%")
    assert choice == "gpt: the choice is 'gpt dp=2', the fastest 'gpt tp=2': regret 25.0%"
    _, better = summary([replace(ROWS[0], predicted=1.2), *ROWS[1:]])
    assert better.endswith("regret 0.0%")


def test_the_time_that_a_quarter_stay_below() -> None:
    assert quarter([9.0, 1.0, 2.0, 3.0, 8.0, 7.0, 6.0, 5.0]) == 3.0


@pytest.mark.parametrize("model", ["gpt", "llama", "conv"])
def test_there_are_ways_of_every_kind(model: str) -> None:
    ways = [str(one) for one in configurations() if one.model == model]
    assert len(ways) >= 10 and len(set(ways)) == len(ways)
    for part in ("dp=2", "tp=2", "pp=2", "recompute=full", "microbatches"):
        assert any(part in way for way in ways)
