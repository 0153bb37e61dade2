"""Messages between processes: sends and receives that are posted and waited for, over torch.distributed.

A message is what one action made for one other rank. Gloo moves each of its tensors from where it lies. NCCL moves it
in one piece, since each call is a launch and takes its turn in the queue between the two ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.program import TensorType
from autopar.ir.schedule import Instruction
from autopar.runtime.kernels import host
from autopar.runtime.pipeline.run_pipeline import Await, Send
from autopar.runtime.ranks.process_groups import Group
from autopar.runtime.ranks.wire import on_wire

LEAVING = 8  # tensors on their way at a time. Gloo says that a send is done only to those who wait for it.
LEAVING_BYTES = 256 << 20  # of them, on any device; one message may be larger
GRAIN = 16  # bytes: where a tensor begins in a message


@dataclass(frozen=True, slots=True)
class PostedReceive:
    """A receive on its way into memory of its own."""

    works: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(frozen=True, slots=True)
class Leaving:
    """A send on its way, with the memory that it reads. step: in which it was posted."""

    work: Any
    sent: torch.Tensor
    line: Instruction
    step: int

    @property
    def is_foreign(self) -> bool:
        """Whether others may write to that memory after the step."""
        return self.line.action.kind == "P"


@dataclass(slots=True)
class Peers:
    """The other ranks of this rank's pipeline. in_order: whether the device does what it is given in order (a GPU).
    Then a send is waited for only where LEAVING_BYTES are on their way: the stream that computes stands still until the
    other rank receives it."""

    group: Group
    device: torch.device
    leaving: deque[Leaving] = field(default_factory=deque)
    step: int = 0

    @property
    def in_order(self) -> bool:
        return not host.on_host(self.device)

    def send(self, message: Send) -> None:
        """Nobody waits in a circle even if every send blocks (`with_transfers`): so old ones may be waited for."""
        self._let_go()
        line, tensors = message.instruction, [one.to(self.device) for one in message.tensors]  # a parameter may wait
        handle, target = self.group.of_messages(line.action), self.group.rank_at(line.peer)
        moved = (_together(tensors, line.types),) if self._is_flat(line) else [one.contiguous() for one in tensors]
        for sent in moved:
            work = dist.isend(on_wire(sent), group=handle, group_dst=target)
            self.leaving.append(Leaving(work, sent, line, self.step))

    def receive(self, line: Instruction) -> PostedReceive:
        handle, source = self.group.of_messages(line.action), self.group.rank_at(line.peer)
        if self._is_flat(line):
            whole = torch.empty(_ends(line.types)[-1], dtype=torch.uint8, device=self.device)
            return PostedReceive((dist.irecv(whole, group=handle, group_src=source),), _apart(whole, line.types))
        tensors = tuple(torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in line.types)
        return PostedReceive(
            tuple(dist.irecv(on_wire(one), group=handle, group_src=source) for one in tensors), tensors
        )

    def wait(self, request: Await) -> tuple[torch.Tensor, ...]:
        """The tensors of a receive. What the other rank has surely got by then is free: all that was sent to it in
        earlier steps, and what the order of its instructions says. On a GPU that holds for the stream that computes,
        and costs it no time, whatever the host knows."""
        tensors: tuple[torch.Tensor, ...] = request.posted.wait()
        still = deque[Leaving]()
        for one in self.leaving:
            is_earlier = one.step < self.step and one.line.peer == request.instruction.peer
            if is_earlier or one.line in request.arrived:
                one.work.wait()
            else:
                still.append(one)
        self.leaving = still
        return tensors

    def finish(self) -> None:
        """The end of a step: what others may write to has left, and with Gloo all else."""
        self.step += 1
        for one in self.leaving:
            if not self.in_order or one.is_foreign:
                one.work.wait()
        self.leaving = deque(one for one in self.leaving if self.in_order and not one.is_foreign)

    def _let_go(self) -> None:
        """Free the buffers of sends that completed."""
        while self.leaving and ((is_late := self._is_late()) or self.leaving[0].work.is_completed()):
            one = self.leaving.popleft()
            if is_late or not self.in_order:
                one.work.wait()

    def _is_late(self) -> bool:
        """Whether too much is on its way for another message."""
        is_many = not self.in_order and len(self.leaving) > LEAVING
        return is_many or sum(one.sent.nbytes for one in self.leaving) > LEAVING_BYTES

    def _is_flat(self, line: Instruction) -> bool:
        return self.in_order and len(line.types) > 1


def _ends(types: Sequence[TensorType]) -> list[int]:
    """Where each tensor ends in a message, at a multiple of GRAIN bytes."""
    return list(itertools.accumulate(-(-type_.bytes_ // GRAIN) * GRAIN for type_ in types))


def _apart(whole: torch.Tensor, types: Sequence[TensorType]) -> tuple[torch.Tensor, ...]:
    """The tensors of a message, as views."""
    starts = (0, *_ends(types))
    return tuple(
        whole[start : start + type_.bytes_].view(type_.dtype).view(type_.shape)
        for start, type_ in zip(starts, types, strict=False)
    )


def _together(tensors: Sequence[torch.Tensor], types: Sequence[TensorType]) -> torch.Tensor:
    """A message in one piece."""
    whole = torch.empty(_ends(types)[-1], dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(_apart(whole, types), tensors, strict=True):
        part.copy_(tensor)
    return whole
