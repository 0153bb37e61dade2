"""The kernels of a program: written for its groups, in one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autopar.ir.ops.fused import Fused
from autopar.runtime.triton.emit import KernelText
from autopar.runtime.triton.launch_kernel import Function, FusedKernel
from autopar.runtime.triton.source import load, name_of, text_of


class Library:
    """Makes a kernel for each group that it is given. The first that runs writes all of those known to one file.

    directory: for that file. plain: computes a group op by op, where it has no kernel. exact: kernels round after each
    op, as eager does, rather than once at the end: for comparisons.
    """

    def __init__(
        self, directory: Path, device: torch.device, plain: Callable[[Fused], Function], exact: bool = False
    ) -> None:
        self._directory, self._device, self._plain, self._exact = directory, device, plain, exact
        self._kernels: dict[str, KernelText] = {}

    def __call__(self, fused: Fused, over: tuple[int | None, ...] = ()) -> FusedKernel:
        """The function of a group's operands. over: for each result the operand over which it may be written."""
        made = FusedKernel(fused, self._plain(fused), self._function, self._device, self._exact, over)
        if made.kernel is not None:
            self._kernels.setdefault(made.kernel.digest, made.kernel)
        return made

    @property
    def source(self) -> str:
        """The file, for people to read; operands of other strides than in it have kernels of their own."""
        return text_of(list(self._kernels.values())) if self._kernels else ""

    def _function(self, kernel: KernelText) -> Any:
        """The function of a kernel: of the program's file, or of one that has it alone."""
        is_known = kernel.digest in self._kernels
        module = load(list(self._kernels.values()) if is_known else [kernel], self._directory)
        return getattr(module, name_of(kernel))
