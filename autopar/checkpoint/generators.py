"""The states of the random generators of a process: torch's, Python's and numpy's."""

from __future__ import annotations

import random
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


def set_generators(states: dict[str, Any]) -> None:
    """Let this process's generators go on from some states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
