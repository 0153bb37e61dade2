"""What a rank does in a collective: primitives among the ranks of an axis, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """One primitive. Parts `[n, ...]` stand in the order of the axis.

    reduce: the `kind` of the ranks' x. gather: [n, ...], the x of each rank. reduce_scatter: of x [n, ...] the `kind`
    of the ranks' parts at this rank's place. exchange: of x [n, ...] part i goes to the rank at place i; [n, ...].
    shift: x goes to the rank at place `to`; the x of the one at place `source`. rows: of x [rows, ...] the next
    `sent[i]` rows go to the rank at place i; [rows, ...], `received[i]` of the rank at place i.

    then: what follows of the result, in which it does not write: others may be given the same. owned: x may be written
    over. Nothing here holds more than `then` needs, since a move may be under way for long.
    """

    primitive: Literal["reduce", "gather", "reduce_scatter", "exchange", "shift", "rows"]
    x: Tensor
    then: Callable[[Tensor], Tensor | Move]
    kind: str = "sum"
    owned: bool = False
    to: int = 0
    source: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


Step = Tensor | Move


@dataclass(frozen=True, slots=True)
class Member:
    """A rank among those of an axis: `place` of `size`."""

    size: int
    place: int
