"""What `python -m benchmarks.planner` says of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from benchmarks.allocated import scratch_of
from benchmarks.planner.__main__ import summary
from benchmarks.planner.configurations import configurations
from benchmarks.planner.measure import Row, Side

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
    steps = [[(1.0, 0.5), (3.0, 0.1)], [(9.0, 0.5), (1.0, 0.2)], [(2.0, 0.1), (4.0, 0.3)]]
    row = Side(way, (), time, steps, [((2.0, 1.0), 5.0), ((1.0, 1.0), 7.0)]).row()
    assert (row.measured, row.optimizer, row.steps, row.held, row.scratch) == (4.0, 0.5, 3, (2.0, 1.0), 7.0)
    assert Side(way, (), "no").row().refused == "no"


def test_scratch_is_what_a_call_frees_before_it_returns_and_what_a_thread_of_gloo_has_alone() -> None:
    def memory(at: float, bytes_: int, address: int, thread: int = 1) -> dict[str, Any]:
        return {"name": "[memory]", "ts": at, "tid": thread, "args": {"Bytes": bytes_, "Addr": address}}

    def call(at: float, end: float, name: str) -> dict[str, Any]:
        return {"name": name, "cat": "cpu_op", "ts": at, "dur": end - at, "tid": 1}

    events = [
        call(0, 10, "aten::convolution"), memory(1, 8, 100), call(2, 6, "aten::empty"), memory(3, 16, 200),
        memory(4, 32, 300), memory(5, 64, 500, thread=2), memory(7, -16, 200), memory(8, -64, 500),
        memory(9, -8, 100), memory(20, -32, 300), memory(21, 4, 100), memory(22, -4, 100),
        call(30, 40, "c10d::reduce_scatter_"), memory(31, 2, 400), memory(32, -2, 400),
        memory(50, 128, 600, thread=2), memory(51, 256, 700), memory(52, -128, 600, thread=2),
        memory(53, -256, 700, thread=2),
    ]  # fmt: skip
    found = scratch_of(events)
    assert sorted(event["args"]["Bytes"] for i, event in enumerate(events) if i in found) == [-128, -16, -8, 8, 16, 128]


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@pytest.mark.parametrize("model", ["gpt", "llama", "conv"])
def test_there_are_ways_of_every_kind(model: str) -> None:
    ways = [str(one) for one in configurations() if one.model == model]
    assert len(ways) >= 10 and len(set(ways)) == len(ways)
    for part in ("dp=2", "tp=2", "pp=2", "recompute=full", "microbatches"):
        assert any(part in way for way in ways)
