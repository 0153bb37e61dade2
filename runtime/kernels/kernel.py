"""How a semantic op is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions of a semantic op.

    run: computes it; writes nothing but what it makes, and knows no autograd. traced: what a compiler takes apart in
    its place; None if it calls the op as it stands, with contiguous operands, for which the op's `meta` is right.
    in_place: (operand, function that writes the result over it) pairs. adding: function of a tensor and the op's
    arguments that adds the result to the tensor, which the op made; a gradient is summed over the micro-batches without
    ever being written alone.
    """

    run: Function
    traced: Function | None = None
    in_place: tuple[tuple[int, Function], ...] = ()
    adding: Function | None = None
