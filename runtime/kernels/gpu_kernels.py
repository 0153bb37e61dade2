"""Finds the GPU's kernels for random bits, which need Triton."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def triton_kernels(device: torch.device) -> Any:
    """The module of GPU kernels; None for a device that has none and where Triton is not installed."""
    return _triton_kernels() if device.type == "cuda" else None


@functools.cache
def _triton_kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("autopar.runtime.kernels.random_triton")
