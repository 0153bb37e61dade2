"""The batches that a plan may be for: as they are asked for, and which ones of a range."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.planning.space.batch_sizes import MOST, read_batches

RANGES = {
    (64, "256-512"): [256, 320, 384, 448, 512],
    (64, "256-1024"): [256, 384, 512, 768, 1024],
    (64, "256-2048"): [256, 384, 512, 768, 1024, 1536, 2048],
    (64, "16-1024"): [16, 32, 64, 128, 256, 512, 1024],
    (48, "1-96"): [3, 6, 12, 24, 48, 96],
    (64, "65-100"): [96],  # no multiple of 64, but of 32
    (7, "8-13"): [8, 9, 10, 11, 12, 13],
    (8, "512-512"): [512],
}


@pytest.mark.parametrize(("gpus", "text"), RANGES, ids=str)
def test_the_batches_of_a_range(gpus: int, text: str) -> None:
    assert read_batches(text, gpus) == RANGES[gpus, text]


def test_every_range_has_some() -> None:
    for gpus in (1, 7, 12, 64):
        for low in range(1, 140):
            for high in (low, low + 1, low + 9, 3 * low, 40 * low):
                found = read_batches(f"{low}-{high}", gpus)
                assert 0 < len(found) <= max(MOST, 11) and low <= found[0] and found[-1] <= high, (gpus, low, high)


def test_a_wide_range_is_quickly_read() -> None:
    assert len(read_batches("1-1000000000", 16384)) < 40


def test_several_batches() -> None:
    assert read_batches("512", 8) == [512] and read_batches("512,256, 512", 8) == [256, 512]


@pytest.mark.parametrize("text", ["0", "x", "8-", "-8", "8-x", "8,", "1-2-3", "0-8"])
def test_what_is_no_batch(text: str) -> None:
    with pytest.raises(PlanError) as raised:
        read_batches(text, 8)
    assert str(raised.value) == (
        f"--batch {text}: write rows of a step, 1 or more: 512, several 256,512 or a range 256-1024."
    )


def test_a_range_that_ends_before_it_begins() -> None:
    with pytest.raises(PlanError, match=r"^--batch 9-8: the range ends with 8 rows, before it begins\. Write 8-9\.$"):
        read_batches("9-8", 8)
