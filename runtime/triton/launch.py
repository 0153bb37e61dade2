"""Runs a fused group as its kernel, or op by op where no kernel can be had."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.ir.fused import Fused
from autopar.runtime.triton.configuration import programs_of
from autopar.runtime.triton.emit import FAR, Kernel, Strides, emit
from autopar.runtime.triton.lower import Lowered, Result, lower
from autopar.runtime.triton.source import load, name_of
from autopar.runtime.triton.values import CannotEmit, wide

_log = logging.getLogger("autopar")
Function = Callable[..., tuple[torch.Tensor, ...]]


class FusedKernel:
    """A group ready to run: called with its operands it gives its results, in memory of their own.

    plain: computes the group op by op, for what has no kernel. directory: where kernels are written. over: for each
    result the operand over which it may be written, None for memory of its own.
    """

    def __init__(
        self, fused: Fused, plain: Function, directory: Path, device: torch.device, exact: bool = False,
        over: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        self.fused, self.plain, self.directory, self.device = fused, plain, directory, device
        self.over = tuple(over) or (None,) * len(fused.results)
        self.reason = ""
        self._variants: dict[Strides, tuple[Kernel, Any]] = {}
        try:
            self.lowered: Lowered | None = lower(fused, exact)
            self.kernel: Kernel | None = emit(self.lowered)
        except CannotEmit as error:
            self.lowered, self.kernel = None, None
            self._give_up(str(error))

    def __call__(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        if self.lowered is None or self.lowered.rows * self.lowered.width == 0:
            return self.plain(*operands)
        strides = tuple(o.stride() if isinstance(o, torch.Tensor) else None for o in operands)
        try:
            kernel, function = self._variants.get(strides) or self._variant(strides)
        except CannotEmit as error:
            self._give_up(str(error))
            return self.plain(*operands)
        if strides in self._variants:
            return self._launch(kernel, function, operands)
        try:
            results = self._launch(kernel, function, operands)
        except Exception as error:  # whatever Triton or the driver say of a kernel that they do not take
            self._give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}")
            return self.plain(*operands)
        self._variants[strides] = kernel, function
        return results

    def _variant(self, strides: Strides) -> tuple[Kernel, Any]:
        """The kernel for operands of some strides."""
        assert self.lowered is not None
        kernel = emit(self.lowered, strides)
        return kernel, getattr(load([kernel], self.directory), name_of(kernel))

    def _give_up(self, reason: str) -> None:
        self.lowered, self.reason = None, reason
        _log.warning("the group %s runs op by op: %s", self.fused.name, reason)

    def _launch(self, kernel: Kernel, function: Any, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        lowered = self.lowered
        assert lowered is not None
        programs = programs_of(kernel.tile, lowered.rows, self.device)
        results = [self._memory(i, result, kernel, operands, programs) for i, result in enumerate(lowered.results)]
        grid = (programs, kernel.tile.across) if kernel.tile.is_persistent else (programs,)
        is_far = max((lowered.rows * lowered.width, *map(_reach, operands))) >= FAR
        with torch.cuda.device_of(results[0]):
            function[grid](*operands, *results, lowered.rows, is_far, num_warps=kernel.tile.warps)
        return tuple(_whole(r, made) for r, made in zip(lowered.results, results, strict=True))

    def _memory(
        self, which: int, result: Result, kernel: Kernel, operands: Sequence[Any], programs: int
    ) -> torch.Tensor:
        """Where the kernel writes a result: a row for each program that sums, new memory, or that of an operand."""
        if result.extent == "columns":
            shape = (programs, self._width)
            return torch.empty(shape, dtype=wide(result.type.dtype), device=self.device)
        over = self.over[which]
        if over is not None and over in kernel.in_place[which]:
            found: torch.Tensor = operands[over].view(result.type.shape)
            return found
        return torch.empty(result.type.shape, dtype=result.type.dtype, device=self.device)

    @functools.cached_property
    def _width(self) -> int:
        assert self.lowered is not None
        return self.lowered.width


def _reach(operand: Any) -> int:
    """The elements between the first and the last of a tensor."""
    if not isinstance(operand, torch.Tensor):
        return 0
    return sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride(), strict=True))


def _whole(result: Result, made: torch.Tensor) -> torch.Tensor:
    """A result; of partial sums their sum, in an order that is always the same."""
    if result.extent == "columns":
        made = made.sum(0)
        if result.type.numel == 1:  # the sum of all elements
            made = made.sum()
        made = made.to(result.type.dtype).view(result.type.shape)
    for order in result.orders:
        made = made.permute(order)
    return made
