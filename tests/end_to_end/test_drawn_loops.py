"""Training loops that are drawn, beside plain PyTorch: a small part of `benchmarks.drawn_loops`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import drawn_loops
from benchmarks.loop_lines import Line, Place

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module", autouse=True)
def _no_pool_is_left() -> Iterator[None]:
    yield
    drawn_loops.close()


def test_drawn_loops_are_as_on_one_device() -> None:
    found = [drawn_loops.verdict(number) for number in range(2, 6)]
    assert not [text for kind, text in found if kind in ("WRONG", "BROKEN")]
    assert "ok" in {kind for kind, _ in found}


def test_drawn_scripts_are_as_on_one_device() -> None:
    """With whole batches on tp, parts of their own under DDP's rules, and one device."""
    found = [drawn_loops.verdict_of_script(number) for number in (3, 7, 8)]
    assert not [text for kind, text in found if kind in ("WRONG", "BROKEN")]
    assert "ok" in {kind for kind, _ in found}


def test_a_loop_that_differs_is_made_short() -> None:
    """The test of the test: a line that tells the two sides apart is all that is left of its loop."""
    place: Place = (1, "dp=1", {})
    told: Line = ("loop", "note('Parallel' in str(type(a).__mro__))")
    lines = [line for line in drawn_loops.drawn(3) if line[0] != "loop"]
    found = drawn_loops.played([*lines, ("loop", "a.scale = 2.0"), told], place, True)
    assert found[0] == "WRONG" and "note.0" in found[2]
    short, again = drawn_loops.shortened([*lines, ("loop", "a.scale = 2.0"), told], place, found)
    assert again[0] == "WRONG" and [line for line in short if line[0] != "head"] == [told]
