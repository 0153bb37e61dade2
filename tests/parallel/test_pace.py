"""A slow rank is named within 20 steps, with how slow it is; none that only waits, and none by a single step."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from processes import ranks_of
from torch import nn

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.parallel.agree import agreement as agreement_of
from autopar.parallel.agree import pace as pace_of
from autopar.parallel.agree.pace import Pace
from autopar.runtime.ranks.waits import Waits


class FakeProcessGroup:
    """The group of all ranks, seen from rank 0."""

    def rank(self) -> int:
        return 0


def told(pace: Pace, steps: list[list[int]]) -> None:
    """Let rank 0 hear what ranks tell in these steps."""
    for numbers in steps:
        pace._own_us = numbers[0]
        pace.heard([*numbers, 0, 0])


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    monkeypatch.setattr(pace_of, "default_group", FakeProcessGroup)
    made = Pace()
    made.lie_over(parse_mesh("dp=2,tp=2"))
    return made


def test_a_slow_rank_is_named_once_with_both_numbers(pace: Pace, caplog: pytest.LogCaptureFixture) -> None:
    told(pace, [[20_000, 21_000, 20_000, 20_500]] * 40)
    assert caplog.messages == []
    told(pace, [[20_000, 21_000, 20_000, 27_300]] * 16)
    assert caplog.messages == [
        "rank 3 (dp=1,tp=1) is slow, and all others wait for it: it works 27.3 ms a step on its own, 1.36 times the "
        "median of the ranks that do the same (20.0 ms). Look at its data loader, and for other work or less speed on "
        "its machine."
    ]
    told(pace, [[20_000, 21_000, 20_000, 27_300]] * 100)
    assert len(caplog.messages) == 1
    told(pace, [[20_000, 21_000, 20_000, 27_300]] * 106)
    assert len(caplog.messages) == 2


def test_noise_and_single_steps_are_no_slow_rank(pace: Pace, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(5)
    steps = [[int(20_000 * chance.uniform(0.85, 1.15)) for _ in range(4)] for _ in range(10_000)]
    for at in range(0, len(steps), 10):  # a save on rank 0, a collection of garbage anywhere
        steps[at][chance.randrange(4)] += 300_000
    told(pace, steps)
    assert caplog.messages == []
    told(pace, [[300, 310, 300, 900]] * 40)  # less than a millisecond
    assert caplog.messages == []


def test_bursts_of_other_work_are_no_slow_rank(pace: Pace, caplog: pytest.LogCaptureFixture) -> None:
    """A machine that others use as well: now one rank and now another one is slow for some steps in a row."""
    chance = random.Random(7)
    steps: list[list[int]] = []
    while len(steps) < 10_000:
        rank, factor = chance.randrange(4), chance.uniform(1.3, 4)
        steps += [[int(20_000 * (factor if each == rank else 1)) for each in range(4)]] * chance.randint(1, 6)
        steps += [[20_000] * 4] * chance.randint(3, 6)
    told(pace, steps)
    assert caplog.messages == []


def test_waiting_for_a_core_is_no_time_of_a_rank() -> None:
    """Two processes on one core: each waits while the other one computes, in an exchange as well as between two. Red
    before: what it waited in exchanges was taken off twice, which left nothing of a rank that waits most of the time,
    and the others were slow beside it."""
    allowed = os.sched_getaffinity(0)
    waited, own = list[float](), list[tuple[float, float]]()

    def compute(waits: Waits, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        waited.append(waits.queued())

    def work() -> None:
        waits = Waits(shares_cores=True)
        begun, spent = waits.clock(), time.thread_time()
        compute(waits, 0.1)
        spent = time.thread_time() - spent
        since = waits.clock()
        compute(waits, 0.2)  # an exchange that spins
        waits.seconds += waits.clock() - since
        own.append((waits.clock() - begun - waits.seconds, spent))

    os.sched_setaffinity(0, {min(allowed)})
    try:
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        process.kill()
        process.wait()
    finally:
        os.sched_setaffinity(0, allowed)
    assert waited[0] > 0.02 and waited[1] - waited[0] > 0.04
    assert own[0][0] == pytest.approx(own[0][1], rel=0.5)


def test_stages_are_compared_with_their_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pace_of, "default_group", FakeProcessGroup)
    made = Pace()
    made.lie_over(parse_mesh("pp=2,dp=2"))
    told(made, [[20_000, 20_000, 90_000, 90_000]] * 40)
    assert caplog.messages == []
    told(made, [[20_000, 20_000, 90_000, 130_000]] * 20)
    assert [message.partition(" is")[0] for message in caplog.messages] == ["rank 3 (pp=1,dp=1)"]


def test_ranks_that_are_more_than_an_exchange_has_room_for_tell_of_windows(
    pace: Pace, caplog: pytest.LogCaptureFixture
) -> None:
    pace._own_us = 5
    assert pace.told(3) == [0, 0, 0]
    assert pace.told(5) == [5, 0, 0, 0, 0]
    for step in range(1, 13):
        pace._own_us = 20_000
        pace.heard(pace.told(3))
        assert pace.is_due == (step % pace_of.WINDOW == 0)
        if pace.is_due:
            pace.heard_windows([pace.window, pace.window, [30_000] * pace_of.WINDOW, pace.window])
    assert [message.partition(" is")[0] for message in caplog.messages] == ["rank 2 (dp=1,tp=0)"]


def _train(rank: int, slow: int, steps: int, room: int = agreement_of.WIDTH) -> list[str]:
    """What is said of slow ranks. room: numbers in an exchange."""
    found: list[str] = []
    agreement_of.WIDTH = room

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, heard = logging.getLogger("autopar"), Heard()
    logger.addHandler(heard)
    model = autopar.parallelize(nn.Linear(4, 4), "dp=2", loss_fn=lambda model, x: model(x).square().mean())
    x: Any = torch.ones(4, 4)
    for _ in range(steps):
        time.sleep(0.05 if rank == slow else 0.02)  # a data loader
        model.forward_backward(x)
    logger.removeHandler(heard)
    return [text for text in found if "is slow" in text]


@pytest.mark.gloo
def test_a_slow_data_loader_is_named_within_20_steps() -> None:
    with ranks_of(2) as ranks:
        for slow, room in ((0, agreement_of.WIDTH), (1, agreement_of.WIDTH), (1, 3)):
            (said, nothing) = ranks.run(_train, slow, 20, room)
            assert [text.partition(" is")[0] for text in said] == [f"rank {slow} (dp={slow})"], said
            assert nothing == []
