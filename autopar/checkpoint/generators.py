"""The states of the random generators of a process: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch


def generators() -> dict[str, Any]:
    """The states of this process's generators."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state(),
    }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(states: Mapping[str, Any]) -> None:
    """Let those of this process's generators that have states go on from them."""
    setters: dict[str, Callable[[Any], Any]] = {
        "torch": torch.set_rng_state, "python": random.setstate, "numpy": numpy.random.set_state,
    }  # fmt: skip
    if torch.cuda.is_available():
        setters["cuda"] = torch.cuda.set_rng_state
    for name in states.keys() & setters.keys():
        setters[name](states[name])


def check_generators(states: Mapping[str, Any]) -> None:
    """Let generators of our own go on from some states, as a trial. Raises what they raise of one that is none."""
    setters: dict[str, Callable[[Any], Any]] = {
        "torch": torch.Generator().set_state, "python": random.Random().setstate,
        "numpy": numpy.random.RandomState().set_state,
    }  # fmt: skip
    if torch.cuda.is_available():
        setters["cuda"] = torch.Generator("cuda").set_state
    for name in states.keys() & setters.keys():
        setters[name](states[name])
