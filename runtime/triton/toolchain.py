"""What generated kernels need of a machine."""

from __future__ import annotations

import importlib.metadata
import re

import torch

from autopar.errors import CompileError

OLDEST = (3, 6)  # of Triton, in which the kernels are tested; torch 2.11 brings it
AMPERE = (8, 0)  # the oldest GPU for which they are compiled in tests


def check_toolchain(device: torch.device, *, interpret: bool) -> None:
    """Raise CompileError if kernels cannot be had for a device here. A CPU needs nothing but where it interprets them:
    their groups run op by op."""
    if device.type == "cpu" and not interpret:
        return
    where = "TRITON_INTERPRET=1" if device.type == "cpu" else str(device)
    version = _installed()
    if version is None:
        raise CompileError(
            f'compile="triton" on {where} needs Triton, which is not installed: pip install triton, or leave compile= '
            f"out."
        )
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise CompileError(
            f'compile="triton" on {where} needs Triton {oldest} or later, and {version} is installed: pip install -U '
            f"triton, or leave compile= out."
        )
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < AMPERE:
        mine, oldest = (".".join(map(str, each)) for each in (torch.cuda.get_device_capability(device), AMPERE))
        raise CompileError(
            f'compile="triton" writes kernels for GPUs of compute capability {oldest} (A100) or later, and {device} '
            f"has {mine}: leave compile= out there, on every rank."
        )


def _installed() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
