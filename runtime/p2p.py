"""Messages between processes: sends and receives that are posted and waited for, over torch.distributed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.schedule import Instruction
from autopar.runtime.pipeline import Send
from autopar.runtime.wire import on_wire


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive on its way into memory of its own."""

    works: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


LEAVING = 8  # tensors on their way at a time. Gloo says that a send is done only to those who wait for it.


@dataclass(slots=True)
class Peers:
    """The other ranks of this rank's pipeline. rank_at: the group's rank at a place on "pp"."""

    group: dist.ProcessGroup
    rank_at: Callable[[int], int]
    device: torch.device
    leaving: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)  # sends, with the memory that they read

    def send(self, message: Send) -> None:
        """Nobody waits in a circle even if every send blocks (`with_transfers`): so old ones may be waited for."""
        while self.leaving and (len(self.leaving) > LEAVING or self.leaving[0][0].is_completed()):
            self.leaving.popleft()[0].wait()
        target = self.rank_at(message.instruction.peer)
        for tensor in message.tensors:
            dense = tensor.contiguous()
            self.leaving.append((dist.isend(on_wire(dense), group=self.group, group_dst=target), dense))

    def receive(self, instruction: Instruction) -> Receive:
        source = self.rank_at(instruction.peer)
        tensors = tuple(torch.empty(type_.shape, dtype=type_.dtype, device=self.device) for type_ in instruction.types)
        works = tuple(dist.irecv(on_wire(tensor), group=self.group, group_src=source) for tensor in tensors)
        return Receive(works, tensors)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()
