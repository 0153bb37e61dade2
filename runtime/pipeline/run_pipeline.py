"""Runs a rank's instruction list: graphs on micro-batches, sends and receives, as one generator for every driver.

A receive is posted where it stands in the list and waited for where its value is first needed, and so is a copy back; a
send, or a copy out, is posted and its memory kept until it has left. What the micro-batches add up to is kept by name
until the epilogue takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.in_turns import in_turns
from autopar.ir.program import Output
from autopar.ir.schedule import ONCE, OUT, Action, Instruction, Span
from autopar.runtime.collectives.mesh_ops import WAIT
from autopar.runtime.executor.executor import Outputs, Request, run
from autopar.runtime.executor.inputs import Key, StepInputs
from autopar.runtime.pipeline.compiled_instructions import (
    PART,
    TOTAL,
    VALUE,
    Count,
    GraphRun,
    Line,
    RankCode,
    Write,
    compile_rank,
)
from autopar.runtime.pipeline.microbatches import GraphTurn, Totals, side_by_side
from autopar.runtime.pipeline.slices import Carried

__all__ = [
    "Await",
    "Copied",
    "Copy",
    "Finals",
    "RankCode",
    "Receive",
    "Send",
    "Watch",
    "compile_rank",
    "outputs_of",
    "steps_of",
]

Finals = dict[tuple[str, str], Any]  # what a step gives, by (kind, name)
Watch = Callable[[Span], None]


@dataclass(frozen=True, slots=True)
class Send:
    """Post the sending of tensors to a rank of the pipeline; nothing is answered."""

    instruction: Instruction
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receiving of what `instruction` says; the answer is for `Await`."""

    instruction: Instruction


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for what was posted by a `Receive`; the answer is the tensors. arrived: the SENDs that have left by then."""

    posted: Any
    instruction: Instruction
    arrived: tuple[Instruction, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Start to copy values into the host's memory, or back, as `instruction` says; the answer is for `Copied`."""

    instruction: Instruction
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Wait for the ends of copies; the answer is what they made."""

    posted: tuple[Any, ...]


Steps = Generator[Any, Any, Finals]


def outputs_of(finals: Finals, wanted: Sequence[Output]) -> Outputs:
    """What a step gives in the order of a program's outputs, None for what other ranks give."""
    return tuple(finals.get((out.kind, out.name)) for out in wanted)


def steps_of(code: RankCode, inputs: StepInputs, watch: Watch | None = None) -> Steps:
    """One step of a rank; yields what it needs of others, returns what the step gives.

    `watch` is told of every instruction when it has ended; its span begins when what it waits for is there.
    """
    step = _Step(code, inputs)
    for place, line in enumerate(code.lines):
        for receive in line.awaits:
            posted, asked = step.posted.pop(receive)
            arrived = code.arrived.get(receive, ())
            request = Copied(posted) if asked.is_copy else Await(posted, asked, arrived)
            del posted
            step.arrive(code.lines[receive], (yield request).pop())
            del request
        for name in line.totals:
            step.values[name, ONCE] = step.totals.take(name)
        start = time.perf_counter() if watch is not None else 0.0
        instruction = line.instruction
        if len(line.runs) == 2:
            first, second = map(step.run, line.runs)
            yield from in_turns((first, second), _is_wait)
        elif line.runs:
            yield from step.run(line.runs[0])
        elif instruction.op == "SEND":
            yield Send(instruction, tuple(step.take(line.reads)))
        elif instruction.is_copy:
            for out in line.ends:  # before what went out comes back
                yield Copied(step.posted.pop(out)[0])
            step.posted[place] = (yield Copy(instruction, tuple(step.take(line.reads)))).pop(), instruction
            if instruction.op == OUT:
                step.store(line, step.posted[place][0])
        else:
            step.posted[place] = (yield Receive(instruction)).pop(), instruction
        for out in line.ends if line.runs else ():
            yield Copied(step.posted.pop(out)[0])
        for key in line.frees:
            step.values.pop(key, None)
        if watch is not None:
            watch(Span(instruction, start * 1e6, time.perf_counter() * 1e6))
    return step.finals


def _is_wait(request: Any) -> bool:
    return isinstance(request, Request) and request.op == WAIT


class _Step:
    """The values of a rank in a step."""

    def __init__(self, code: RankCode, inputs: StepInputs) -> None:
        self.flow, self.time = code.pipeline.flow, code.pipeline.time
        self.carried: dict[int, Carried] = {}  # by stage
        self.values: dict[Key, Any] = dict(inputs)
        self.posted: dict[int, tuple[Any, Instruction]] = {}  # receives, by their places
        self.totals = Totals(code.pipeline.reductions, self.time)
        self.finals: Finals = {}

    def run(self, run: GraphRun) -> Generator[Any, Any, None]:
        """Run the graph of an action."""
        if run.count is not None:
            self.counted(run.count, (yield from side_by_side(self.counts(run.count), self.time)))
        action, carried = run.action, self.carried_by(run.action)
        turn = GraphTurn(action.microbatch, self.time, carried)
        self.write(run.writes, (yield from run.graph.steps(self.read(run), turn)))
        carried.end(action.kind, action.microbatch, goes_back=self.goes_back(action))

    def read(self, run: GraphRun) -> list[Any]:
        """What a graph is given. Whoever gets the list has the only reference to what dies here."""
        return [*self.take(run.reads), *map(self.totals.so_far, run.graph.sums)]

    def take(self, reads: Iterable[tuple[Key, bool]]) -> list[Any]:
        values = self.values
        return [values.pop(key) if dies else values[key] for key, dies in reads]

    def write(self, writes: Iterable[Write], outputs: tuple[Any, ...]) -> None:
        for write, value in zip(writes, outputs, strict=True):
            name, microbatch = write.key
            if write.place == VALUE:
                self.values[name, microbatch] = value
            elif write.place == PART:
                self.totals.add(name, microbatch, value)
            elif write.place == TOTAL:
                self.totals.put(name, value)
            else:
                self.finals[write.kind, name] = value

    def carried_by(self, action: Action) -> Carried:
        """What the slices of a stage keep for one another."""
        return self.carried.setdefault(action.stage, Carried(self.flow.lengths or (1,) * self.flow.slices))

    def goes_back(self, action: Action) -> bool:
        """True if the backward pass of a stage reads what its slices keep."""
        work = self.flow.works.get((action.stage, "B"))
        return work is not None and bool(work.carries)

    def arrive(self, receive: Line, tensors: Sequence[torch.Tensor]) -> None:
        for key, tensor in zip(receive.makes or [key for key, _ in receive.reads], tensors, strict=True):
            self.values[key] = tensor

    def store(self, line: Line, posted: Sequence[Any]) -> None:
        """What lies in the host's memory when copies out have ended is there for those back, which wait for these."""
        for key, copying in zip(line.makes, posted, strict=True):
            self.values[key] = copying.result

    def counts(self, count: Count) -> list[Any]:
        """The runs of what the prologue needs of all micro-batches together."""
        each = zip(count.executables, count.reads, strict=True)
        return [run(executable, [self.values[key] for key in reads]) for executable, reads in each]

    def counted(self, count: Count, outputs: tuple[Any, ...]) -> None:
        self.values.update(zip(count.writes, outputs, strict=True))
