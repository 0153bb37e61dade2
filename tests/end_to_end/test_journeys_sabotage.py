"""With each fix taken out a short journey goes red, which is green with it: journeys see what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.journeys.machine import FAILED, Journey, replay
from benchmarks.journeys.pools import Pools
from benchmarks.journeys.sabotage import FAULTS, SABOTAGES

pytestmark = pytest.mark.gloo
HANGS = pytest.mark.slow  # until Gloo gives up, after 45 s


def journey(
    mesh: str, *actions: tuple[str, dict[str, Any]], options: dict[str, Any] | None = None, block: str = "mlp",
    **more: Any,
) -> Journey:  # fmt: skip
    setup = {
        "mesh": mesh, "options": options or {}, "head": "regress", "width": 8, "blocks": [block], "optimizer": "AdamW",
        "rows": 5, "warm": True, **more,
    }  # fmt: skip
    return (("begin", setup), *actions)


STEP = ("forward_backward", {"seed": 3})
SHORT = {
    "placements": journey("dp=2,tp=2", ("whole_weights", {}), options={"zero": 1}),
    "sums": journey("fsdp=2", ("clip_by_sums", {"limit": 0.3})),
    "generators": journey("fsdp=2", ("add_noise", {"scale": 0.1})),
    "containers": journey("dp=1", ("in_a_container", {"seed": 1, "kind": "namespace"})),
    "holders": journey("dp=1", ("optimizer_step", {}), before="states"),
    "digests": journey("dp=2", ("other_data_on_one_rank", {"seed": 1})),
    "guards": journey("dp=1", ("set_gain", {"value": 0.5}), STEP),
    "hooks": journey("dp=1", ("gradient_hook", {"which": 0, "factor": 0.5}), STEP),
    "draws": journey("dp=1", ("roll_out", {"seed": 1, "calls": 2}), block="dropout"),
    "gathered": journey("dp=1", ("gather", {"write": True, "on_one": False})),
    "dims": journey(
        "dp=2",
        STEP,
        options={"batch_dims": (0, 0, None)},
        batch="local",
        share=0.5,
        odd="as long by chance",
        warm=False,
    ),
    "uneven": journey("dp=2", STEP, options={"batch_dims": 0}, batch="local", share=0.625),
    "dtype of sums": journey("dp=2", STEP, options={"precision": "bf16"}, block="multihead", optimizer="SGD"),
    "replicas": journey("dp=2", ("other_weight_on_one_rank", {})),
    "calls": journey("dp=2", ("another_call_on_one_rank", {"seed": 1})),
}


def test_every_fix_has_a_short_journey() -> None:
    assert set(SHORT) == set(SABOTAGES)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=HANGS) if name == "calls" else name for name in SHORT])
def test_a_fix_that_is_taken_out_is_missed(pools: Pools, name: str) -> None:
    _, report = replay(pools, SHORT[name])
    assert report.verdict == "ok", report
    without = Pools(name)
    try:
        _, report = replay(without, SHORT[name])
    finally:
        without.close()
    assert report.verdict in FAILED, report


TRAIN = (("optimizer_step", {}), ("train", {"seed": 1}))
FAULTY = {
    "a sum": ("dp=2", ()),
    "a gradient": ("dp=1", ()),
    "rows": ("dp=1", ()),
    "a step": ("dp=1", TRAIN),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_numbers_is_seen_in_every_dtype(pools: Pools, name: str) -> None:
    """What rounding excuses of a short float is told in float64."""
    mesh, actions = FAULTY[name]
    faulty = Pools(name)
    try:
        for dtype in ("float64", "float32", "bfloat16"):
            taken = journey(mesh, STEP, *actions, optimizer="SGD", dtype=dtype)
            _, report = replay(pools, taken)
            assert report.verdict == "ok", (dtype, report)
            _, report = replay(faulty, taken)
            assert report.verdict == "WRONG", (dtype, report)
    finally:
        faulty.close()
