"""Messages between ranks that live in one process: the k-th receive of a pair takes the k-th send."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from autopar.errors import RankError
from autopar.ir.program import TensorType
from autopar.ir.schedule import Instruction
from autopar.runtime.pipeline.run_pipeline import Send


@dataclass(slots=True)
class LocalReceive:
    """A receive that is posted; `tensors` once they are there."""

    source: int
    target: int
    instruction: Instruction
    tensors: tuple[torch.Tensor, ...] | None = None


@dataclass(slots=True)
class Messages:
    """What is on its way between ranks, by (source, target)."""

    sent: dict[tuple[int, int], deque[Send]] = field(default_factory=dict)
    expected: dict[tuple[int, int], deque[LocalReceive]] = field(default_factory=dict)

    def send(self, source: int, target: int, message: Send) -> None:
        self.sent.setdefault((source, target), deque()).append(message)
        self._deliver((source, target))

    def expect(self, source: int, target: int, instruction: Instruction) -> LocalReceive:
        receive = LocalReceive(source, target, instruction)
        self.expected.setdefault((source, target), deque()).append(receive)
        self._deliver((source, target))
        return receive

    def left(self) -> list[str]:
        """What nobody has taken, or what never came."""
        found = [f"rank {a} sent '{message.instruction}', which rank {b} does not receive"
                 for (a, b), messages in self.sent.items() for message in messages]  # fmt: skip
        return found + [f"rank {b} waits for '{receive.instruction}', which rank {a} does not send"
                        for (a, b), tickets in self.expected.items() for receive in tickets]  # fmt: skip

    def _deliver(self, pair: tuple[int, int]) -> None:
        sent, expected = self.sent.get(pair), self.expected.get(pair)
        while sent and expected:
            message, receive = sent.popleft(), expected.popleft()
            given, wanted = message.instruction, receive.instruction
            types = tuple(TensorType(tuple(tensor.shape), tensor.dtype) for tensor in message.tensors)
            if (given.action, given.values) != (wanted.action, wanted.values) or types != wanted.types:
                raise RankError(
                    f"rank {pair[0]} sends '{given}' ({_show(types)}) where rank {pair[1]} is at '{wanted}' "
                    f"({_show(wanted.types)})."
                )
            # a copy, dense: what a real transfer gives
            receive.tensors = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in message.tensors)


def _show(types: tuple[TensorType, ...]) -> str:
    return ", ".join(f"{str(type_.dtype).removeprefix('torch.')}{list(type_.shape)}" for type_ in types)
