"""What a compilation makes is not walked again, and what is garbage of it is found in the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from autopar.compiler.garbage import uncollected


class Node:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """conftest.py freezes what it imports."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if is_frozen:
        gc.freeze()


def test_what_was_made_meanwhile_is_old_and_garbage_is_found() -> None:
    gc.collect()
    with uncollected():
        assert not gc.isenabled()
        made = [Node() for _ in range(5000)]
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    young = {id(each) for each in gc.get_objects(generation=0)}
    assert not any(id(each) in young for each in made)
    seen = weakref.ref(made[0])
    made.clear()
    gc.collect()
    assert seen() is None


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() == count > 0
    finally:
        gc.unfreeze()
