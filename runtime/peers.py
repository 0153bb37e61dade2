"""Messages between processes: sends and receives that are posted and waited for, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.schedule import Instruction
from autopar.runtime.pipeline import Send


@dataclass(frozen=True, slots=True)
class Posted:
    """A receive on its way into memory of its own."""

    works: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class Peers:
    """The other ranks of this rank's pipeline. rank_at: the process at a place on "pp"."""

    group: dist.ProcessGroup
    rank_at: Callable[[int], int]
    device: torch.device
    leaving: list[tuple[Any, torch.Tensor]] = field(default_factory=list)  # sends, with the memory that they read

    def send(self, letter: Send) -> None:
        self.leaving = [pair for pair in self.leaving if not pair[0].is_completed()]
        target = self.rank_at(letter.instruction.peer)
        for tensor in letter.tensors:
            dense = tensor.contiguous()
            self.leaving.append((dist.isend(dense, target, group=self.group), dense))

    def receive(self, instruction: Instruction) -> Posted:
        source = self.rank_at(instruction.peer)
        tensors = tuple(torch.empty(type_.shape, dtype=type_.dtype, device=self.device) for type_ in instruction.types)
        works = tuple(dist.irecv(tensor, source, group=self.group) for tensor in tensors)
        return Posted(works, tensors)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()
