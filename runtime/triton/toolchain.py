"""Whether this machine can compile generated kernels."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from autopar.errors import CompileError

OLDEST_TRITON, OLDEST_GPU = (3, 6), (8, 0)
_INSTEAD = 'write compile="executor", which runs op by op, or compile="inductor".'


def has_toolchain(device: torch.device) -> bool:
    """Whether generated kernels run on a device as they are: Triton compiles them, and does not interpret them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        check_toolchain(device, interpret=False)
    except CompileError:
        return False
    return True


def check_toolchain(device: torch.device, interpret: bool) -> None:
    """Raise CompileError if a device, or Triton's interpreter in its place, lacks what generated kernels need.

    A CPU without the interpreter needs nothing: it runs groups op by op.
    """
    if device.type != "cuda" and not interpret:
        return
    where = f"on {device.type}" if device.type == "cuda" else "with TRITON_INTERPRET=1"
    wanted = ".".join(map(str, OLDEST_TRITON))
    if importlib.util.find_spec("triton") is None:
        raise CompileError(
            f'compile="triton" {where} needs Triton {wanted} or newer, which is not installed: pip install triton, or '
            f"{_INSTEAD}"
        )
    found = str(importlib.import_module("triton").__version__)
    if tuple(map(int, found.split("+")[0].split(".")[:2])) < OLDEST_TRITON:
        raise CompileError(
            f'compile="triton" {where} needs Triton {wanted} or newer, and this is {found}: pip install -U triton, or '
            f"{_INSTEAD}"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_GPU:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise CompileError(
            f'compile="triton" needs a GPU of compute capability {".".join(map(str, OLDEST_GPU))} or newer (A100, '
            f"H100), and {device} is a {torch.cuda.get_device_name(device)} of {capability}: {_INSTEAD}"
        )
