"""What the slices of a sequence leave on their stage for one another: keys and values, and gradients of these.

The micro-batches of a step are numbered micro-batch * slices + slice. The forward pass of a slice reads the keys and
values of those up to it; what its attention gives to the gradients of all of them is taken by each when its own
backward pass has come, after those of the slices behind it (TeraPipe, arXiv 2102.07988, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_SHORT = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Carried:
    """The values that one stage keeps. lengths: of the slices, or how they compare. pieces: of forward passes, by key
    and micro-batch, until its backward pass. rests: sums of gradients of the slices that are still to come, by key and
    sequence."""

    lengths: Sequence[int]
    pieces: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    rests: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    @property
    def slices(self) -> int:
        return len(self.lengths)

    def earlier(self, x: torch.Tensor, dim: int, key: str, microbatch: int) -> torch.Tensor:
        """The slices of a sequence up to this one, side by side. The first x of a slice is kept as it is; others are
        the same, computed again."""
        self.keep(key, microbatch, x)
        return torch.cat([*self.before(key, microbatch), self.pieces[key, microbatch]], dim)

    def keep(self, key: str, microbatch: int, x: torch.Tensor) -> None:
        """Keep the piece of a slice, for itself and those behind it."""
        self.pieces.setdefault((key, microbatch), x)

    def before(self, key: str, microbatch: int) -> list[torch.Tensor]:
        """The pieces of the slices of a sequence before this one."""
        first = microbatch - microbatch % self.slices
        return [self.pieces[key, place] for place in range(first, microbatch)]

    def later(self, x: torch.Tensor, dim: int, key: str, microbatch: int, owned: bool) -> torch.Tensor:
        """This slice's piece of a sum, of which x is the last part: of all slices up to this one, as `earlier` gave
        them, maybe with zeros behind. The rest stays for those. Short floats are added in float32. owned: x may be
        written over."""
        total = self.rest(key, microbatch)
        if total is None:
            total = x if owned and wide(x.dtype) == x.dtype else x.to(wide(x.dtype), copy=True)
        else:
            total += x.narrow(dim, 0, total.shape[dim])
        mine, left = apart(total, dim, self.lengths, microbatch % self.slices)
        self.leave(key, microbatch, left)
        return mine.to(x.dtype, copy=True)

    def rest(self, key: str, microbatch: int) -> torch.Tensor | None:
        """What the slices behind this one left of a sum; nothing of the last slice."""
        return self.rests.pop((key, microbatch // self.slices), None)

    def leave(self, key: str, microbatch: int, left: torch.Tensor | None) -> None:
        """Leave the rest of a sum for the slices before this one."""
        if left is not None:
            self.rests[key, microbatch // self.slices] = left

    def end(self, kind: str, microbatch: int, *, goes_back: bool) -> None:
        """Drop what nothing reads after an action. goes_back: the backward pass reads what the forward pass kept."""
        if kind == "F" and goes_back:
            return
        if kind != "F":
            gone = {microbatch}
        elif (microbatch + 1) % self.slices == 0:
            gone = set(range(microbatch + 1 - self.slices, microbatch + 1))
        else:
            return
        self.pieces = {key: piece for key, piece in self.pieces.items() if key[1] not in gone}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which slices add."""
    return torch.float32 if dtype in _SHORT else dtype


def apart(
    total: torch.Tensor, dim: int, lengths: Sequence[int], slice_: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A slice's piece of the sum of all up to it, and what is left for those before it. lengths: of all slices."""
    size = total.shape[dim]
    start = size * sum(lengths[:slice_]) // sum(lengths[: slice_ + 1])
    return total.narrow(dim, start, size - start), total.narrow(dim, 0, start) if slice_ else None
