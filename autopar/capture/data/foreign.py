"""Python's and numpy's global generators, from which a compiled step does not draw: whether what they give matters.

A model may draw from them and not use it: a layer drop with p = 0. It is run with generators that give the smallest and
the largest number, so that a threshold in between decides otherwise, then with some between and some at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_WORDS = (0x40, 0xFFFFFFFF, 0x80000000, 0x40000000, 0xC0000000)  # of 32 bits, the first of a number
_SEEDS = 3
_SIZE = 624  # words of the Mersenne Twister (Matsumoto and Nishimura 1998)


def foreign_state() -> dict[str, Any]:
    """The state of the global generators that are not torch's, to be compared."""
    state: Any = np.random.get_state()
    return {"Python's random module": random.getstate(), "numpy.random": (bytes(state[1]), state[2])}


@contextmanager
def kept() -> Iterator[None]:
    """Leave the generators as they are."""
    before: tuple[Any, Any] = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def settings() -> Iterator[None]:
    """Set the generators to one state after another; call it inside of `kept`."""
    for word in _WORDS:
        words = [_untempered(word)] * _SIZE
        random.setstate((3, (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))
        yield
    for seed in range(_SEEDS):
        random.seed(seed)
        np.random.seed(seed)
        yield


def _untempered(word: int) -> int:
    """The word of the state whose output is `word`."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(4):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found
    for _ in range(2):
        found = word ^ (found >> 11)
    return found & 0xFFFFFFFF
