"""Drawn programs of views and writes in place: a small part of `benchmarks.in_place`."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import in_place


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_drawn_programs_are_as_on_one_device(first: int) -> None:
    found = {number: in_place.verdict(number) for number in range(first, first + 20)}
    assert not [text for kind, text in found.values() if kind in ("WRONG", "BROKEN")]
    assert Counter(kind for kind, _ in found.values())["ok"] >= 4
