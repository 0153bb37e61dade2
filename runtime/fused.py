"""A group of calls as a function: its calls one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.fused import Fused
from autopar.runtime.executor import CPU, Executable, Outputs, run


def plain(fused: Fused, device: torch.device = CPU) -> Callable[..., Outputs]:
    """What a group computes, call by call: where it has no kernel, and to compare kernels with."""
    executable = Executable(fused.graph, device=device)

    def call(*operands: Any) -> Outputs:
        try:
            next(run(executable, operands))
        except StopIteration as done:
            outputs: Outputs = done.value
            return outputs
        raise AssertionError(f"{fused.__name__} asks for a mesh")

    return call
