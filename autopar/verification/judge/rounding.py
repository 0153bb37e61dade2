"""Monte Carlo arithmetic: a run whose results are off by one unit in the last place, at random (Parker, 1997).

A kernel rounds once what a program's ops round each: a mean over all rows that is off by one unit is the same error in
every row, which adds up in the gradients before it. So BatchNorm, which programs take apart, is taken apart here too.

What is changed is what was rounded. A whole number is exact (a mask, a count, a target of 0 or 1, a probability that
reached 1), so it stays, and nothing becomes one: no value leaves its domain, [0, 1] or what a logarithm takes. Infinity
and NaN stay as well, and nothing becomes infinite.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.ir.ops.op_facts import is_view, may_return_operand
from autopar.torch_compat import TorchDispatchMode, decompositions_of, no_function_modes, tree_map

aten = torch.ops.aten
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a float of so many bytes
BLOCK = 1 << 14  # elements that are changed at once: what is computed between lies in the cache
_TABLE = 1 << 18  # random units that are drawn once


class Rounded(TorchDispatchMode):
    """Every result of an op is off by one unit in its last place, up, down or not at all. short: the place that is the
    last one of a shorter float."""

    def __init__(self, seed: int, short: torch.dtype | None = None) -> None:
        super().__init__()
        self.units = Units(seed, short)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_function_modes():  # no cast of torch's own is the model's, nor are the numbers drawn here
            if func in _taken_apart():
                with self:
                    return _taken_apart()[func](*args, **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            if not is_view(func) and not may_return_operand(func):
                tree_map(self.units.add_to, found)
        return found


@cache
def _taken_apart() -> Mapping[Any, Callable[..., Any]]:
    return decompositions_of([aten.native_batch_norm, aten.native_batch_norm_backward])


class Units:
    """Random units in the last place, or in that of a shorter float."""

    def __init__(self, seed: int, short: torch.dtype | None = None) -> None:
        self.seed, self.short = seed, short
        self.starts = random.Random(seed)
        self.signs: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def add_to(self, value: Any) -> None:
        """Change a float or complex tensor in place."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
            return
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj()) if not value.is_conj() else None
        if value is None or not value.is_floating_point() or value.dtype.itemsize not in _BITS:
            return
        dense = value.permute(sorted(range(value.ndim), key=value.stride, reverse=True))
        flat = dense.reshape(-1)  # a view, but of a tensor with gaps
        for block in flat.split(BLOCK):
            self._add_to(block)
        if not dense.is_contiguous():
            dense.copy_(flat.view(dense.shape))

    def add_to_parameters(self, model: nn.Module) -> None:
        """Change the parameters of a module in place."""
        for parameter in model.parameters():
            self.add_to(parameter.data)

    def _add_to(self, block: torch.Tensor) -> None:
        bits = block.view(_BITS[block.dtype.itemsize])
        moved = (bits + self._units(bits, block.dtype)).view(block.dtype)
        most, (low, high) = torch.finfo(block.dtype).eps ** -0.5, torch.aminmax(block)
        has_large = not (-most <= low.item() and high.item() <= most)  # or NaN
        moves = _is_rounded(block, has_large) & _is_rounded(moved, has_large)
        torch.where(moves, moved, block, out=block)

    def _units(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """One of -1, 0 and 1 units for each element: from a random place of a long table of them, since drawing numbers
        would take as long as all else here."""
        key = bits.device, dtype
        if key not in self.signs:
            generator = torch.Generator(bits.device).manual_seed(self.seed)
            drawn = torch.empty(_TABLE + BLOCK, dtype=bits.dtype, device=bits.device)
            unit = 1 if self.short is None else int(torch.finfo(self.short).eps / torch.finfo(dtype).eps) or 1
            self.signs[key] = unit * drawn.random_(-1, 2, generator=generator)
        start = self.starts.randrange(_TABLE)
        return self.signs[key][start : start + bits.numel()]


def _is_rounded(value: torch.Tensor, has_large: bool) -> torch.Tensor:
    """True for finite numbers that are not whole, and whole ones that rounding made: the larger ones have few digits
    behind the point, or none."""
    found = value.frac().abs_() > 0  # of infinity and NaN it is NaN
    if not has_large:
        return found
    return found | ((value.abs() > torch.finfo(value.dtype).eps ** -0.5) & value.isfinite())
