"""What a rank really did, and when: instructions, collectives and messages, with their times.

A recorder stands between a rank's generator and its driver. So it sees every request and the time until its answer, on
a virtual mesh as over torch.distributed, and neither of them knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.ir.ops.ops import COPIES
from autopar.ir.program import record
from autopar.ir.schedule import Action, Instruction, Span
from autopar.runtime.collectives.mesh_ops import WAIT, is_local
from autopar.runtime.executor.executor import Request
from autopar.runtime.pipeline.run_pipeline import Await, Copied, Copy, Receive, Send

PROFILER = "torch.profiler"  # in place of a recorder: runs name what they do there
RUN, COLLECTIVE, WAITED, POSTED, OTHER = "run", "collective", "wait", "post", "step"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank did. kind: one of the names above. action: in which of a pipeline's it happened; of a
    message, after which its values exist. text: of a message the instruction. step: the number of the step."""

    kind: str
    name: str
    start_us: float = 0
    end_us: float = 0
    step: int = 0
    action: Action | None = None
    text: str = ""
    module: str = ""
    bytes: int = 0


@dataclass(slots=True)
class Recorder:
    """The events of one rank in order of their ends. synchronize: called before each time is taken, on devices that
    work apart from the program that drives them."""

    synchronize: Callable[[], None] | None = None
    events: list[Event] = field(default_factory=list)
    step: int = 0
    _open: list[Event] = field(default_factory=list)  # of the instruction that has not ended

    def now_us(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.perf_counter() * 1e6

    def watch(self, span: Span) -> None:
        """An instruction has ended; what its graph waited for before it began is no part of it."""
        line, end = span.instruction, self.now_us()
        start = max([span.start_us, *(event.end_us for event in self._open if event.kind == WAITED)])
        for event in self._open:
            self.events.append(replace(event, action=event.action or line.action))
        self._open.clear()
        if line.op == "RUN":
            self.events.append(Event(RUN, str(line), start, end, self.step, line.action))

    def observe(self, steps: Any) -> Generator[Any, Any, Any]:
        """The same generator, of which every request is timed."""
        answer: Any = None
        try:
            while True:
                try:
                    request = steps.send(answer)
                except StopIteration as done:
                    self.events += self._open
                    self._open.clear()
                    return done.value
                if is_unseen(request):
                    answer = yield request
                    continue
                event = _event(request, self.step)
                start = self.now_us()
                answer = yield request
                del request  # it holds a tensor that may die in the next step
                self._open.append(replace(event, start_us=start, end_us=self.now_us()))
        finally:
            steps.close()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Something else that happens inside."""
        start = self.now_us()
        yield
        self.events.append(Event(OTHER, name, start, self.now_us(), self.step))


def is_unseen(request: Any) -> bool:
    """True for what is answered without a word to other ranks."""
    is_copy = isinstance(request, (Copy, Copied))
    return is_copy or (isinstance(request, Request) and (is_local(request.op) or request.op in COPIES))


def _event(request: Any, step: int) -> Event:
    """What a request is, with no times yet."""
    if isinstance(request, (Send, Receive)):
        line: Instruction = request.instruction
        return Event(POSTED, str(line), step=step, action=line.action, text=str(line), bytes=_bytes(line))
    if isinstance(request, Await):
        line = request.instruction
        name = f"wait for {line.action} from rank {line.peer}"
        return Event(WAITED, name, step=step, action=line.action, text=str(line), bytes=_bytes(line))
    node, name = request.node, request.op.__name__.split(".")[0]
    operand = request.args[0]
    axis = "" if request.op == WAIT else f" {request.args[1]}"
    size = operand.numel() * operand.element_size() if isinstance(operand, torch.Tensor) else 0
    module = record(node).module if request.op != WAIT else ""
    return Event(COLLECTIVE, f"{name}{axis} %{node.name}", step=step, module=module, bytes=size)


def _bytes(line: Instruction) -> int:
    return sum(type_.bytes_ for type_ in line.types)
