"""Random journeys of users around a parallel model equal the plain module, or are refused: see benchmarks/journeys."""

from __future__ import annotations

import importlib
import pprint
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.torch_compat import local_of
from autopar.verification.judge.rounding import Rounded
from benchmarks.journeys import ranks
from benchmarks.journeys.actions import ACTIONS, Action
from benchmarks.journeys.compare import floats_of, leaves_of
from benchmarks.journeys.machine import Journey, replay, run_row
from benchmarks.journeys.pools import Pools
from benchmarks.journeys.ranks import Report
from benchmarks.journeys.side import Side

pytestmark = pytest.mark.gloo
ROWS = 15
MESHES = ("dp=1", "dp=1", "dp=2", "tp=2", "fsdp=2", "pp=2")  # the others are in `python -m benchmarks.journeys`
SETUP: dict[str, Any] = {
    "mesh": "dp=1", "options": {}, "head": "regress", "width": 6, "blocks": ["mlp", "average"], "optimizer": "Adam",
    "rows": 5, "warm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.mark.parametrize("number", range(ROWS))
def test_a_journey_equals_the_plain_module(pools: Pools, number: int) -> None:
    row = run_row(pools, 0, number, shrink_s=10, meshes=MESHES, most=12)
    assert row.failure is None, f"{row.failure}\n{pprint.pformat(list(row.shortest), width=120)}"


def test_what_follows_a_refused_call_is_none_of_it(pools: Pools) -> None:
    """An optimizer from before compares its groups at its first step, in a call of its own."""
    actions = (("another_call_on_one_rank", {"seed": 1}), ("optimizer_step", {}))
    _, report = replay(pools, (("begin", {**SETUP, "mesh": "dp=2", "before": "states"}), *actions))
    assert report.verdict == "ok", report


# -- rows are the same everywhere -------------------------------------------------------------------------------------


class NoRanks:
    """In place of `Pools`: every action goes well, and nothing runs."""

    def run(self, size: int, work: Any, *args: Any) -> Report:
        return Report("ok", "", frozenset({"ready", "exact", "chain", "gradients", "optimizer", "stateful"}))


def _drawn() -> list[Journey]:
    return [run_row(NoRanks(), 0, number).first for number in range(40)]  # type: ignore[arg-type]


def test_rows_do_not_hang_on_constants_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis's own backend draws some integers from the constants of all imported modules that are nobody's."""
    before = _drawn()
    (tmp_path / "with_constants.py").write_text(f"NUMBERS = {list(range(100, 255))}")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("with_constants").NUMBERS
    try:
        assert _drawn() == before
    finally:
        del sys.modules["with_constants"]
    assert len({repr(journey) for journey in before}) == len(before)


# -- the tester, tested ---------------------------------------------------------------------------------------------


ACTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("train", {"seed": 1}), ("gradient_hook", {"which": 1, "factor": 0.5}), ("roll_out", {"seed": 2, "calls": 2}),
    ("set_temperature", {"value": 2.0}), ("add_noise", {"scale": 0.1}), ("torch_save", {}), ("metrics", {"seed": 0}),
    ("move", {"to": 0, "way": "dcp"}), ("train", {"seed": 3}),
)  # fmt: skip


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


def _infinite(side: Side) -> None:
    with torch.no_grad():
        local_of(side.model.head.weight).view(-1)[0] = float("-inf")


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_the_plain_side_takes_its_journey_again(tmp_path: Path, precision: str | None) -> None:
    """Without rounding to the bit, with it elsewhere: what is measured is the noise of the same journey."""
    setup = {**SETUP, "options": {"precision": precision} if precision else {}, "optimizer": "SGD", "aux": True}
    try:
        assert ranks.begin(0, setup, str(tmp_path)).verdict == "ok"
        for name, args in ACTED:
            report = ranks.act(0, name, args)
            assert report.verdict == "ok", (name, report)
            pair = ranks._held["pair"]
            expected = floats_of(leaves_of(pair.theirs, None, pair.theirs))
            (again,) = pair._again(lambda model: None, False)
            assert all(torch.equal(again[key], value) for key, value in expected.items()), name
            with Rounded(0):
                (moved,) = pair._again(lambda model: None, True)
            key = ("weight", "head.weight")
            assert 0 < float((moved[key] - expected[key]).norm()) < (1e-2 if precision else 1e-13), name
    finally:
        dist.destroy_process_group()
        ranks._held.clear()


HARMS = {
    harm.__name__[1:]: harm
    for harm in (_weight, _gradient, _no_gradient, _buffer, _state, _rate, _frozen, _mode, _nan, _infinite)
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


def _refused_midway(side: Side, harm: float) -> None:
    """An action of two parts, whose second one a parallel model refuses, after having changed something or not."""
    with torch.no_grad():
        side.model.head.weight.mul_(2.0)
        side.mark()
        if side.is_parallel:
            side.model.head.weight.add_(harm)
            raise AutoparError("no.")
        side.model.head.weight.mul_(3.0)


@pytest.mark.parametrize(("harm", "verdict"), [(0.0, "refused"), (1e-6, "WRONG")])
def test_a_refusal_that_changes_something_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: float, verdict: str
) -> None:
    """What came before the refusal stays; what is refused has not happened."""
    monkeypatch.setitem(ACTIONS, "midway", Action("midway", _refused_midway, {}, (), None))
    try:
        assert ranks.begin(0, SETUP, str(tmp_path)).verdict == "ok"
        report = ranks.act(0, "midway", {"harm": harm})
        assert report.verdict == verdict, report
    finally:
        dist.destroy_process_group()
        ranks._held.clear()
