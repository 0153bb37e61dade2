"""Compile without looking for garbage: what a compilation makes lives on, and each collection would walk it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 500_000  # objects; to walk fewer takes less time than to learn whether a user froze some: these are counted


@contextmanager
def uncollected(lives_on: bool = False) -> Iterator[None]:
    """Keep Python from looking for cycles of objects that nothing else holds, while the context lasts. The
    user's callbacks of its collector (`gc.callbacks`) do not run in the middle of a trace then. lives_on: nearly all
    that is made stays, and joins the old objects if it is much: else the next collection, of young ones, walks it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if lives_on and gc.get_count()[0] > MANY and not gc.get_freeze_count():  # what a user froze stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
