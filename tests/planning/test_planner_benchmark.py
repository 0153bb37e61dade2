"""What `python -m benchmarks.planner` says of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from benchmarks.planner.__main__ import summary
from benchmarks.planner.configurations import configurations
from benchmarks.planner.measure import Row, Side, row_of

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


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_median_counts() -> None:
    way = next(iter(configurations()))
    time = autopar.compile(nn.Linear(2, 2), "dp=1", loss_fn=loss_fn, batch=(torch.empty(2, 2),)).time("cpu")
    ranks = [
        Side(float, time, (2.0, 1.0), [1.0, 9.0, 2.0], [0.5, 0.5, 0.1]),
        Side(float, time, (1.0, 1.0), [3.0, 1.0, 4.0], [0.1, 0.2, 0.3]),
    ]
    row = row_of(way, ranks)
    assert (row.measured, row.optimizer, row.steps, row.held) == (4.0, 0.5, 3, (2.0, 1.0))
    assert row_of(way, [ranks[0], "no"]).refused == "no"


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@pytest.mark.parametrize("model", ["gpt", "llama", "conv"])
def test_there_are_ways_of_every_kind(model: str) -> None:
    ways = [str(one) for one in configurations() if one.model == model]
    assert len(ways) >= 10 and len(set(ways)) == len(ways)
    for part in ("dp=2", "tp=2", "pp=2", "recompute=full", "microbatches"):
        assert any(part in way for way in ways)
