"""Runs a rank's instruction list: graphs on micro-batches, sends and receives, as one generator for every driver.

A receive is posted where it stands in the list and waited for where its value is first needed; a send is posted and its
memory kept until it has left. What the micro-batches add up to is kept by name until the epilogue takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.program import Output
from autopar.ir.schedule import ONCE, Action, Instruction, Span
from autopar.runtime.executor.executor import Outputs, run
from autopar.runtime.executor.inputs import Key, StepInputs
from autopar.runtime.pipeline.compiled_instructions import PART, TOTAL, VALUE, Count, Line, RankCode, compile_rank
from autopar.runtime.pipeline.microbatches import GraphTurn, Totals, side_by_side
from autopar.runtime.pipeline.slices import Carried

__all__ = ["Await", "Finals", "RankCode", "Receive", "Send", "Watch", "compile_rank", "outputs_of", "steps_of"]

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
    """Wait for what was posted by a `Receive`; the answer is the tensors."""

    posted: Any
    instruction: Instruction


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
            step.arrive(code.lines[receive], (yield Await(*step.posted.pop(receive))).pop())
        for name in line.totals:
            step.values[name, ONCE] = step.totals.take(name)
        start = time.perf_counter() if watch is not None else 0.0
        instruction = line.instruction
        if line.graph is not None:
            if line.count is not None:
                step.counted(line.count, (yield from side_by_side(step.counts(line.count), step.time)))
            action, carried = instruction.action, step.carried_by(instruction.action)
            turn = GraphTurn(action.microbatch, step.time, carried)
            step.write(line, (yield from line.graph.steps(step.read(line), turn)))
            carried.end(action.kind, action.microbatch, goes_back=step.goes_back(action))
        elif instruction.op == "SEND":
            yield Send(instruction, tuple(step.read(line)))
        else:
            step.posted[place] = (yield Receive(instruction)).pop(), instruction
        for key in line.frees:
            step.values.pop(key, None)
        if watch is not None:
            watch(Span(instruction, start * 1e6, time.perf_counter() * 1e6))
    return step.finals


class _Step:
    """The values of a rank in a step."""

    def __init__(self, code: RankCode, inputs: StepInputs) -> None:
        self.flow, self.time = code.pipeline.flow, code.pipeline.time
        self.carried: dict[int, Carried] = {}  # by stage
        self.values: dict[Key, Any] = dict(inputs)
        self.posted: dict[int, tuple[Any, Instruction]] = {}  # receives, by their places
        self.totals = Totals(code.pipeline.reductions, self.time)
        self.finals: Finals = {}

    def read(self, line: Line) -> list[Any]:
        """What a line reads. Whoever gets the list has the only reference to what dies here."""
        values = self.values
        found = [values.pop(key) if dies else values[key] for key, dies in line.reads]
        found += [self.totals.so_far(name) for name in line.sums]
        return found

    def write(self, line: Line, outputs: tuple[Any, ...]) -> None:
        for write, value in zip(line.writes, outputs, strict=True):
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
        for (key, _), tensor in zip(receive.reads, tensors, strict=True):
            self.values[key] = tensor

    def counts(self, count: Count) -> list[Any]:
        """The runs of what the prologue needs of all micro-batches together."""
        each = zip(count.executables, count.reads, strict=True)
        return [run(executable, [self.values[key] for key in reads]) for executable, reads in each]

    def counted(self, count: Count, outputs: tuple[Any, ...]) -> None:
        self.values.update(zip(count.writes, outputs, strict=True))
