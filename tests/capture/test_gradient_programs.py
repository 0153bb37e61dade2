"""Drawn programs of hooks, checkpoints and gradients of a model's own: a small part of `benchmarks.drawn_gradients`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import drawn_gradients

FOUND = (90, 2064, 4098, 4306, 4464)  # that were wrong once


@pytest.mark.parametrize("numbers", [FOUND, range(16), range(16, 32)], ids=["found", "first", "second"])
def test_drawn_programs_are_as_on_one_device(numbers: Sequence[int]) -> None:
    found = {number: drawn_gradients.verdict(number) for number in numbers}
    assert not [text for kind, text in found.values() if kind in ("WRONG", "BROKEN")]
    assert "ok" in {kind for kind, _ in found.values()}
