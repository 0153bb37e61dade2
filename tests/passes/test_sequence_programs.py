"""Drawn programs over the positions of sequences: a small part of `benchmarks.drawn_sequences`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import drawn_sequences


@pytest.mark.parametrize("numbers", [range(4, 9), range(9, 13)], ids=["first", "second"])
def test_drawn_programs_are_as_on_one_device(numbers: Sequence[int]) -> None:
    found = {number: drawn_sequences.verdict(number) for number in numbers}
    assert not [text for kind, text in found.values() if kind in ("WRONG", "BROKEN")]
    assert "ok" in {kind for kind, _ in found.values()}
