"""Compile without looking for garbage: what a compilation makes lives on, and each collection would walk it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for cycles of objects that nothing else holds, while the context lasts. The
    user's callbacks of its collector (`gc.callbacks`) do not run in the middle of a trace then."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what was made joins what is old: else the first collection walks all of it
                gc.freeze()
                gc.unfreeze()
            gc.enable()
