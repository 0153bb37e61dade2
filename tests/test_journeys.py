"""Random journeys of users around a parallel model equal the plain module, or are refused: see benchmarks/journeys."""

from __future__ import annotations

import pprint
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.torch_compat import local_of
from benchmarks.journeys import ranks
from benchmarks.journeys.machine import run_row
from benchmarks.journeys.pools import Pools
from benchmarks.journeys.side import Side

pytestmark = pytest.mark.gloo
ROWS = 25
SETUP: dict[str, Any] = {
    "mesh": "dp=1", "options": {}, "head": "regress", "width": 6, "blocks": ["mlp", "average"], "optimizer": "Adam",
    "rows": 5, "warm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.mark.slow  # minutes; and which journeys a number stands for hangs on the constants in the source
@pytest.mark.parametrize("number", range(ROWS))
def test_a_journey_equals_the_plain_module(pools: Pools, number: int) -> None:
    row = run_row(pools, 0, number)
    assert row.failure is None, f"{row.failure}\n{pprint.pformat(list(row.shortest), width=120)}"


# -- the tester, tested ---------------------------------------------------------------------------------------------


def _weight(side: Side) -> None:
    with torch.no_grad():
        local_of(side.model.head.weight).view(-1)[-1] += 1e-6


def _gradient(side: Side) -> None:
    local_of(side.model.blocks[0].up.bias.grad)[0] *= 1 + 1e-5


def _no_gradient(side: Side) -> None:
    side.model.head.weight.grad = None


def _buffer(side: Side) -> None:
    side.model.blocks[1].mean[0] += 1e-6


def _state(side: Side) -> None:
    assert side.optimizer is not None
    local_of(side.optimizer.state[side.model.head.weight]["exp_avg"]).mul_(1 + 1e-6)


def _rate(side: Side) -> None:
    assert side.optimizer is not None
    side.optimizer.param_groups[0]["lr"] *= 1.001


def _frozen(side: Side) -> None:
    side.model.head.weight.requires_grad_(False)


def _mode(side: Side) -> None:
    side.model.blocks[0].eval()


def _nan(side: Side) -> None:
    with torch.no_grad():
        local_of(side.model.head.weight).view(-1)[0] = float("nan")


HARMS = {
    harm.__name__[1:]: harm for harm in (_weight, _gradient, _no_gradient, _buffer, _state, _rate, _frozen, _mode, _nan)
}


@pytest.mark.parametrize("what", HARMS)
def test_what_differs_is_seen(tmp_path: Path, what: str) -> None:
    """Each thing that a side holds, changed a little on the parallel side alone, is named."""
    try:
        assert ranks.begin(0, SETUP, str(tmp_path)).verdict == "ok"
        assert ranks.act(0, "optimizer_step", {}).verdict == "ok"
        HARMS[what](ranks._held["pair"].ours)
        report = ranks.act(0, "whole_weights", {})
        assert report.verdict == "WRONG", report
    finally:
        dist.destroy_process_group()
        ranks._held.clear()
