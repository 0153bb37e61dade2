"""A group of calls as a function: its calls one by one, or a kernel that is written for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autopar.ir.ops.fused import Fused
from autopar.runtime.executor.executor import CPU, Executable, Kernels, Outputs, run


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


def kernels_for(
    compiler: str | None, device: torch.device, interpret: bool, directory: Path, exact: bool = False
) -> Kernels | None:
    """What runs the groups of a program on a device; None where their calls run one by one, as on a CPU.

    interpret: a CPU runs the kernels too, in Triton's interpreter. directory: where kernels are kept. exact: they round
    after each op.
    """
    if compiler != "triton" or not (interpret or device.type == "cuda"):
        return None
    from autopar.runtime.triton.library import Library

    return Library(directory, device, lambda fused: plain(fused, device), exact)
