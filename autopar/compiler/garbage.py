"""Compile without looking for garbage: what a compilation makes lives on, and each collection would walk it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """As long as the context lasts, Python looks for no cycles of objects that nothing else holds. Nor do the user's
    callbacks of its collector (`gc.callbacks`) run in the middle of a trace."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
