"""Monte Carlo arithmetic: a run whose results are off by one unit in the last place, at random (Parker, 1997).

A kernel rounds once what a program's ops round each: a mean over all rows that is off by one unit is the same error in
every row, which adds up in the gradients before it. So BatchNorm, which programs take apart, is taken apart here too.

What is changed is what was rounded. A whole number is exact (a mask, a count, a target of 0 or 1, a probability that
reached 1), so it stays, and nothing becomes one: no value leaves its domain, [0, 1] or what a logarithm takes. Infinity
and NaN stay as well, and nothing becomes infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.ir.ops.op_facts import is_view, may_return_operand
from autopar.torch_compat import TorchDispatchMode, decompositions_of, no_function_modes, tree_map

aten = torch.ops.aten
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a float of so many bytes


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
        self.generators: dict[torch.device, torch.Generator] = {}

    def add_to(self, value: Any) -> None:
        """Change a float or complex tensor in place."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
            return
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj()) if not value.is_conj() else None
        if value is None or not value.is_floating_point() or value.dtype.itemsize not in _BITS:
            return
        bits = value.view(_BITS[value.dtype.itemsize])
        unit = 1 if self.short is None else int(torch.finfo(self.short).eps / torch.finfo(value.dtype).eps) or 1
        moved = (bits + unit * self._signs(bits)).view(value.dtype)
        stays = ~(value.isfinite() & moved.isfinite()) | _is_whole(value) | _is_whole(moved)
        value.copy_(torch.where(stays, value, moved))

    def add_to_parameters(self, model: nn.Module) -> None:
        """Change the parameters of a module in place."""
        for parameter in model.parameters():
            self.add_to(parameter.data)

    def _signs(self, bits: torch.Tensor) -> torch.Tensor:
        made = self.generators.get(bits.device)
        if made is None:
            made = self.generators[bits.device] = torch.Generator(bits.device).manual_seed(self.seed)
        return torch.empty_like(bits).random_(-1, 2, generator=made)


def _is_whole(value: torch.Tensor) -> torch.Tensor:
    """True for whole numbers that no rounding made: the larger ones have few digits behind the point, or none."""
    return (value == value.round()) & (value.abs() <= torch.finfo(value.dtype).eps ** -0.5)
