"""Runs a fused group as its kernel, or op by op where no kernel can be had."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.ops.fused import Fused
from autopar.runtime.triton.configuration import processors_of, programs_of
from autopar.runtime.triton.emit import FAR, KernelText, Strides, emit
from autopar.runtime.triton.lowering.lower import LoweredGroup, Result, lower
from autopar.runtime.triton.lowering.values import CannotEmit, wide

_log = logging.getLogger("autopar")
Function = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel for operands of some strides, ready to run: how many programs, and whether places need 64 bits."""

    kernel: KernelText
    function: Any
    programs: int
    is_far: bool


class FusedKernel:
    """A group ready to run: called with its operands it gives its results, in memory of their own.

    plain: computes the group op by op, for what has no kernel. compiled: gives the function of a kernel. over: for each
    result the operand over which it may be written, None for memory of its own. processors: of the GPU, those of
    `device` if not given. say: told of a group without a kernel. reason: why it has none, if so.
    """

    def __init__(
        self, fused: Fused, plain: Function, compiled: Callable[[KernelText], Any], device: torch.device,
        exact: bool = False, over: Sequence[int | None] = (), processors: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.fused, self.plain, self.compiled, self.device = fused, plain, compiled, device
        self.exact, self.say = exact, say or _say
        self.processors = processors or processors_of(device)
        self.over = tuple(over) or (None,) * len(fused.results)
        self.reason = ""
        self.lowered: LoweredGroup | None = None
        self.kernel: KernelText | None = None
        self._launches: dict[Strides, Launch] = {}
        try:
            self.lowered = lower(fused, exact)
            self.kernel = emit(self.lowered)
        except CannotEmit as error:
            self._give_up(str(error))

    def __call__(self, *operands: Any) -> Sequence[torch.Tensor]:
        if self.lowered is None or self.lowered.rows * self.lowered.width == 0:
            return self.plain(*operands)
        strides = tuple(o.stride() if isinstance(o, torch.Tensor) else None for o in operands)
        known = self._launches.get(strides)
        if known is None:
            return self._first(strides, operands)
        results = self._allocate(self.lowered, known, operands)
        self._start(known, operands, results)
        return self._results(results)

    def _first(self, strides: Strides, operands: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The first call with operands of some strides: what Triton or the driver refuse, they refuse here; of any
        kind, the compiler's, the assembler's, the driver's, or a file that can be written nowhere."""
        assert self.lowered is not None
        try:
            made = self._launch(self.lowered, strides, operands)
        except Exception as error:
            self._give_up(_reason(error))
            return self.plain(*operands)
        results = self._allocate(self.lowered, made, operands)
        try:
            self._start(made, operands, results)
        except Exception as error:
            self._give_up(_reason(error))
            return self.plain(*operands)
        self._launches[strides] = made
        return self._results(results)

    def _launch(self, lowered: LoweredGroup, strides: Strides, operands: Sequence[Any]) -> Launch:
        for i, (operand, type_) in enumerate(zip(operands, lowered.operands, strict=True)):
            if type_ is not None and (operand.dtype, tuple(operand.shape)) != (type_.dtype, type_.shape):
                raise CannotEmit(
                    f"operand {i} is {operand.dtype} {list(operand.shape)}, not {type_.dtype} {list(type_.shape)}"
                )
        kernel = emit(lowered, strides)
        is_far = max((lowered.rows * lowered.width, *map(_reach, operands))) >= FAR
        return Launch(kernel, self.compiled(kernel), programs_of(kernel.tile, lowered.rows, self.processors), is_far)

    def _give_up(self, reason: str) -> None:
        self.lowered, self.reason = None, reason
        self.say(f"the group {self.fused.name} runs op by op, without a kernel: {reason}")

    def _allocate(self, lowered: LoweredGroup, launch: Launch, operands: Sequence[Any]) -> list[torch.Tensor]:
        """Where the kernel writes."""
        return [self._memory(i, result, lowered, launch, operands) for i, result in enumerate(lowered.results)]

    def _memory(
        self, which: int, result: Result, lowered: LoweredGroup, launch: Launch, operands: Sequence[Any]
    ) -> torch.Tensor:
        """The memory of a result: a row for each program for sums over rows; new, or that of an operand, for others."""
        if result.extent == "columns":
            shape = launch.programs, lowered.width
            return torch.empty(shape, dtype=wide(result.type.dtype), device=self.device)
        over = self.over[which]
        if over is not None and over in launch.kernel.in_place[which]:
            view: torch.Tensor = operands[over].view(result.type.shape)
            return view
        return torch.empty(result.type.shape, dtype=result.type.dtype, device=self.device)

    def _start(self, launch: Launch, operands: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        lowered, tile = self.lowered, launch.kernel.tile
        assert lowered is not None
        grid = (launch.programs, tile.across) if tile.is_persistent else (launch.programs,)
        with torch.cuda.device_of(results[0]):  # a launch of Triton's goes to the current device
            launch.function[grid](
                *operands, *results, lowered.rows, launch.is_far,
                num_warps=tile.warps, enable_fp_fusion=not self.exact,
            )  # fmt: skip

    def _results(self, written: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the group gives, of what its kernel writes."""
        assert self.lowered is not None
        return [_whole(result, made) for result, made in zip(self.lowered.results, written, strict=True)]


def _reason(error: Exception) -> str:
    """Why a group has no kernel, in a line."""
    if isinstance(error, CannotEmit):
        return str(error)
    return " ".join((f"{type(error).__name__}:", *str(error).strip().splitlines()[-1:]))


@functools.cache
def _say(what: str) -> None:
    """Log a warning, once in a process: layers are alike."""
    _log.warning("%s", what)


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
