"""All ranks of a mesh in one process: collectives are tensor maths between the ranks' values.

The ranks run in a fixed order, each until it waits for the others, so that a run is deterministic. Where ranks do
not ask for the same thing, the error says who waits at which node: what a real backend would hang on or get wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import BatchError, RankError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.ops import COPIES, collective_of, op, whole_of
from autopar.ir.program import TensorType
from autopar.ir.schedule import Instruction
from autopar.runtime.collectives.collectives import together
from autopar.runtime.collectives.mesh_ops import WAIT, axis_group, is_local, local_answer
from autopar.runtime.collectives.rows_to_owners import bound_of, check_bound
from autopar.runtime.executor.executor import CPU, Executable, Outputs, Request, at_call, describe, run
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.pipeline.run_pipeline import Await, Copied, Copy, Finals, RankCode, Receive, Send, steps_of
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.tiers.host_tier import Copying, host_tier

RankObserve = Callable[[int, fx.Node, Any], None]

ROUTE = op("route")


class VirtualMesh:
    """Runs LOCAL graphs on every rank of a mesh, in this process."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._coords = mesh.coords()
        self._groups: dict[str, list[tuple[int, ...]]] = {}
        self.tiers = [host_tier(CPU) for _ in self._coords]

    def run(
        self,
        executables: Executable | Sequence[Executable],
        inputs: Sequence[Iterable[Any]],
        observe: RankObserve | None = None,
    ) -> list[Outputs]:
        """The outputs of every rank. One executable serves all ranks, or there is one a rank.

        `inputs[r]` are the placeholders' values on rank r; an iterator lets them be freed at their last use.
        `observe(rank, node, value)` sees every value of every rank.
        """
        programs = [executables] * self.mesh.size if isinstance(executables, Executable) else list(executables)
        if len(programs) != self.mesh.size or len(inputs) != self.mesh.size:
            raise RankError(
                f"mesh '{self.mesh}' has {self.mesh.size} ranks, but there are programs for {len(programs)} "
                f"and inputs for {len(inputs)}."
            )
        with torch.no_grad():
            steps = [
                run(program, given, _for_rank(observe, rank))
                for rank, (program, given) in enumerate(zip(programs, inputs, strict=True))
            ]
            return self._drive(steps)

    def run_pipeline(
        self, codes: Sequence[RankCode], inputs: Sequence[StepInputs], recorders: Sequence[Recorder] | None = None
    ) -> list[Finals]:
        """What a step gives on every rank. `codes[k]` is run by the ranks with coordinate k on "pp".

        `recorders[r]` sees what rank r does, with times of this one process.
        """
        with torch.no_grad():
            places = [coord.get(PIPELINE, 0) for coord in self._coords]
            if recorders is None:
                steps: list[Any] = [steps_of(codes[place], inputs[rank]) for rank, place in enumerate(places)]
            else:
                every = zip(places, inputs, recorders, strict=True)
                steps = [seen.observe(steps_of(codes[place], mine, seen.watch)) for place, mine, seen in every]
            finals = self._drive(steps)
        left = self._mail.left()
        if left:
            raise RankError("messages are left over:\n" + "\n".join(f"  {line}" for line in left))
        return finals

    def _drive(self, steps: Sequence[Any]) -> list[Any]:
        self._mail = Messages()
        waiting: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        answers: dict[int, list[Any] | None] = dict.fromkeys(range(len(steps)))
        while len(outputs) < len(steps):
            if not answers:
                raise RankError(self._report("the ranks wait for each other", waiting, outputs))
            for rank in sorted(answers):
                self._advance(rank, steps[rank], answers.pop(rank), waiting, outputs)
            for rank in range(len(steps)):
                if rank not in waiting:
                    continue
                if isinstance(waiting[rank], Await):
                    answers.update(self._arrived(rank, waiting))
                else:
                    answers.update(self._meet(rank, waiting, outputs))
        return [outputs[rank] for rank in range(len(steps))]

    def _advance(
        self,
        rank: int,
        step: Any,
        answer: list[Any] | None,
        waiting: dict[int, Any],
        outputs: dict[int, Any],
    ) -> None:
        """Run one rank until it needs the others or is done."""
        try:
            while True:
                request = step.send(answer)
                if isinstance(request, Send):
                    self._mail.send(rank, self._peer(rank, request.instruction), request)
                    answer = [None]
                elif isinstance(request, Receive):
                    answer = [self._mail.expect(self._peer(rank, request.instruction), rank, request.instruction)]
                elif isinstance(request, Await):
                    waiting[rank] = request
                    return
                elif isinstance(request, Copy):
                    answer = [self.tiers[rank].copy(request.instruction, request.values)]
                elif isinstance(request, Copied):
                    answer = [tuple(copying.wait() for copying in request.posted)]
                elif request.op == WAIT:
                    answer = [given.wait() if isinstance(given := request.args[0], Copying) else given]
                    del given
                elif request.op in COPIES:
                    answer = [self.tiers[rank].start(request.op, *request.args)]
                elif is_local(request.op):
                    answer = [local_answer(self.mesh, self._coords[rank], request.op, request.args)]
                else:
                    waiting[rank] = request
                    return
                del request  # it holds a tensor that may die in the next step
        except StopIteration as done:
            outputs[rank] = done.value
        except Exception as error:
            error.add_note(f"on rank {rank} at {self._at(rank)}")
            raise

    def _peer(self, rank: int, instruction: Instruction) -> int:
        return self.mesh.rank({**self._coords[rank], PIPELINE: instruction.peer})

    def _arrived(self, rank: int, waiting: dict[int, Any]) -> dict[int, list[Any]]:
        """The tensors that a rank waits for, if they are there."""
        receive = waiting[rank].posted
        if receive.tensors is None:
            return {}
        del waiting[rank]
        return {rank: [receive.tensors]}

    def _meet(self, rank: int, waiting: dict[int, Request], outputs: dict[int, Outputs]) -> dict[int, list[Any]]:
        """The answers for the group that `rank` waits for, if all of it is there."""
        axis = _axis(waiting[rank])
        group = self._group(rank, axis)
        if any(member in outputs for member in group):
            raise RankError(self._report("a rank waits for one that has finished", waiting, outputs, group))
        if any(not isinstance(waiting.get(member), Request) or _axis(waiting[member]) != axis for member in group):
            return {}  # the others may still come here; if not, `_drive` sees that nothing moves
        requests = [waiting[member] for member in group]
        if len({_signature(request) for request in requests}) > 1:
            raise RankError(self._report("ranks that must ask for the same do not", waiting, outputs, group))
        for member in group:
            del waiting[member]
        try:
            results = together([(request.op, request.args) for request in requests])
            if whole_of(requests[0].op) is ROUTE and bound_of(requests[0].node):
                for place, counts in enumerate(results):
                    check_bound(requests[0].node, counts.cpu(), place)
            return {member: [result] for member, result in zip(group, results, strict=True)}
        except BatchError as error:
            raise at_call(error, requests[0].node) from None
        except Exception as error:
            error.add_note(f"in {describe(requests[0].node)}\non ranks {', '.join(map(str, group))} over '{axis}'")
            raise

    def _group(self, rank: int, axis: str) -> tuple[int, ...]:
        if axis not in self._groups:
            self._groups[axis] = [axis_group(self.mesh, r, axis) for r in range(self.mesh.size)]
        return self._groups[axis][rank]

    def _at(self, rank: int) -> str:
        return ",".join(f"{name}={place}" for name, place in self._coords[rank].items())

    def _report(
        self, what: str, waiting: dict[int, Request], outputs: dict[int, Outputs], ranks: Sequence[int] | None = None
    ) -> str:
        lines = [f"{what}:"]
        for rank in range(self.mesh.size) if ranks is None else ranks:
            state = "finished" if rank in outputs else "running"
            request = waiting.get(rank)
            if isinstance(request, Await):
                state = f"waits for rank {request.posted.source} at '{request.instruction}'"
            elif request is not None:
                wants = ", ".join(_show(arg) for arg in request.args)
                state = f"waits at {describe(request.node)}\n    with ({wants})"
            lines.append(f"  rank {rank} ({self._at(rank)}) {state}")
        return "\n".join(lines)


def _for_rank(observe: RankObserve | None, rank: int) -> Callable[[fx.Node, Any], None] | None:
    if observe is None:
        return None
    return lambda node, value: observe(rank, node, value)


def _axis(request: Request) -> str:
    axis = request.args[1]
    assert isinstance(axis, str)
    return axis


def _signature(request: Request) -> tuple[Any, ...]:
    x = request.args[0]
    if collective_of(request.op).owned is None:
        return request.op, tuple(x.shape), x.dtype, request.args[1:]
    return request.op, tuple(x.shape[1:]), x.dtype, request.args[1]  # ranks have different numbers of rows


def _show(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}".replace(" ", "")
    return repr(arg)


# -- messages: the k-th receive of a pair of ranks takes the k-th send ------------------------------------------------


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
                    f"rank {pair[0]} sends '{given}' ({_shown(types)}) where rank {pair[1]} is at '{wanted}' "
                    f"({_shown(wanted.types)})."
                )
            # a copy, dense: what a real transfer gives
            receive.tensors = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in message.tensors)


def _shown(types: tuple[TensorType, ...]) -> str:
    return ", ".join(f"{str(type_.dtype).removeprefix('torch.')}{list(type_.shape)}" for type_ in types)
