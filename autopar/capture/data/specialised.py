"""Calls that fail for want of data, with the numbers of the example batch (`specialize=True`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autopar.capture.data.data_sizes import SIZED, UNSIZED, places
from autopar.capture.data.folding import with_numbers
from autopar.capture.data.known_values import STEADY, Values
from autopar.capture.data.reads import COUNT, Reads
from autopar.capture.refusals.location import Line

Tensor = torch.Tensor


class _NotAllowed(Exception):
    """A number is wanted, and nobody said that it may be taken."""


@dataclass(slots=True)
class _Numbers:
    """Numbers of the example batch for a call at a line, and the tensors that they are made of."""

    reads: Reads | None
    line: Line | None
    sources: list[Tensor] = field(default_factory=list)

    def of(self, tensor: Tensor) -> Any:
        """What a tensor of one integer holds."""
        self.sources.append(tensor)
        return NotImplemented if self.reads is None else self.reads.take(Tensor.__int__, tensor, self.line)

    def count(self, tensor: Tensor, source: Tensor) -> int:
        """A size that is made of another tensor."""
        self.sources.append(source)
        if self.reads is None:
            raise _NotAllowed
        count = self.reads.take(COUNT, tensor, self.line)
        assert isinstance(count, int)
        return count

    def places(self, mask: Tensor) -> list[Tensor]:
        """Where a mask holds."""
        return places(mask, self.count)


def specialised(
    function: Any, args: Any, kwargs: Any, reads: Reads | None, values: Values, line: Line | None
) -> tuple[Callable[[], Any] | None, bool]:
    """The call with numbers of the example batch, and whether a permission to take them would do."""
    numbers = _Numbers(reads, line)
    try:
        call = _of_fixed_size(function, args, kwargs, numbers)
    except _NotAllowed:
        call = None
    return call, bool(numbers.sources) and not values.operands(numbers.sources, None).kinds & ~STEADY


def _of_fixed_size(function: Any, args: Any, kwargs: Any, numbers: _Numbers) -> Callable[[], Any] | None:
    if function in SIZED:
        without = UNSIZED.get(function) if numbers.reads is None else None
        result = NotImplemented if without is None else without(*args, **kwargs)
        if result is NotImplemented:
            result = SIZED[function](numbers.count, *args, **kwargs)
        if result is not NotImplemented:
            return lambda: result
    changed = with_numbers(function, args, kwargs, numbers.of, numbers.places)
    return None if changed is None else partial(function, *changed[0], **changed[1])
