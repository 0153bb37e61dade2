"""Drawn programs of views and writes in place: a small part of `benchmarks.in_place`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import in_place

FOUND = (115, 134, 262, 293, 299, 542, 554, 655, 673, 730)  # that were wrong once


@pytest.mark.parametrize("numbers", [FOUND, range(20), range(20, 40)], ids=["found", "first", "second"])
def test_drawn_programs_are_as_on_one_device(numbers: Sequence[int]) -> None:
    found = {number: in_place.verdict(number) for number in numbers}
    assert not [text for kind, text in found.values() if kind in ("WRONG", "BROKEN")]
    assert "ok" in {kind for kind, _ in found.values()}
