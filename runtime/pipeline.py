"""Runs a rank's instruction list: graphs on micro-batches, sends and receives, as one generator for every driver.

A receive is posted where it stands in the list and waited for where its value is first needed; a send is posted and its
memory kept until it has left. What the micro-batches add up to is kept by name until the epilogue takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.pipeline import Join, Pipeline
from autopar.ir.plan import MICROBATCH
from autopar.ir.schedule import ONCE, Action, Instruction, Span
from autopar.runtime.executor import Executable, Request, compile_graph, run
from autopar.runtime.mesh_ops import ALL_GATHER, COORD, is_local, join, local_answer, reduce_parts

Finals = dict[tuple[str, str], Any]  # what a step gives, by (kind, name)
Key = tuple[str, int]  # (value, micro-batch)
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


@dataclass(frozen=True)
class RankCode:
    """What one rank of a pipeline runs; the same for all ranks with its coordinate on "pp"."""

    pipeline: Pipeline
    rank: int
    executables: Mapping[tuple[int, str], Executable]
    step_values: frozenset[str]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.pipeline.lists[self.rank]


def compile_rank(pipeline: Pipeline, rank: int) -> RankCode:
    """The graphs of a rank, each turned into Python once."""
    flow = pipeline.flow
    mine = {
        key: compile_graph(program.graph)
        for key, program in pipeline.graphs.items()
        if (flow.ranks[key[0]] if key[1] in "FBIW" else key[0]) == rank
    }
    return RankCode(pipeline, rank, mine, flow.step_values())


@dataclass(slots=True)
class Given:
    """What a step starts from: `whole` values by placeholder, and those of each micro-batch."""

    whole: Mapping[str, Any]
    parts: Mapping[str, Sequence[Any]]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.whole.values(), *(part for parts in self.parts.values() for part in parts)]


@dataclass(slots=True)
class Totals:
    """What the micro-batches add up to."""

    joins: Mapping[str, Join]
    parts: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)

    def add(self, name: str, microbatch: int, part: torch.Tensor) -> None:
        kind = self.joins[name].kind
        if kind == "gather":
            self.parts.setdefault(name, {})[microbatch] = part
        elif name not in self.parts:
            self.parts[name] = part  # may be memory that others look at
        elif kind == "sum" and name in self.owned:
            self.parts[name].add_(part)
        else:
            self.owned.add(name)
            self.parts[name] = _COMBINE[kind](self.parts[name], part)

    def take(self, name: str) -> torch.Tensor:
        how, found = self.joins[name], self.parts[name]
        if how.kind != "gather":
            return found
        return join(torch.stack([found[i] for i in sorted(found)]), how.dim, how.outer)

    def drop(self, name: str) -> None:
        self.parts.pop(name, None)


_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "logsumexp": torch.logaddexp,
}


def steps_of(code: RankCode, given: Given, watch: Watch | None = None) -> Steps:
    """One step of a rank; yields what it needs of others, returns what the step gives.

    `watch` is told of every instruction when it has ended.
    """
    return (yield from _Step(code, given, watch).run())


class _Step:
    def __init__(self, code: RankCode, given: Given, watch: Watch | None) -> None:
        self.code, self.given, self.watch = code, given, watch
        self.count = code.pipeline.microbatches
        self.values: dict[Key, Any] = {}
        self.posted: dict[Key, tuple[Any, Instruction]] = {}
        self.totals = Totals(code.pipeline.joins)
        self.finals: Finals = {}

    def run(self) -> Steps:
        for instruction in self.code.instructions:
            start = time.perf_counter() if self.watch is not None else 0.0
            if instruction.op == "RUN":
                yield from self._run(instruction)
            elif instruction.op == "SEND":
                tensors = []
                for name in instruction.values:
                    tensors.append((yield from self._value(*self._key(name, instruction))))
                yield Send(instruction, tuple(tensors))
                del tensors
            else:
                posted = (yield Receive(instruction)).pop()
                for name in instruction.values:
                    self.posted[self._key(name, instruction)] = posted, instruction
            self._free(instruction)
            if self.watch is not None:
                self.watch(Span(instruction, start * 1e6, time.perf_counter() * 1e6))
        return self.finals

    def _run(self, instruction: Instruction) -> Generator[Any, Any, None]:
        action = instruction.action
        program, executable = self.code.pipeline.graph(action), self.code.executables[action.stage, action.kind]
        if action.kind == "P" and (action.stage, "C") in self.code.executables:
            yield from self._count(action.stage)
        inputs = []
        for node, entry in zip(program.placeholders, program.inputs, strict=True):
            inputs.append((yield from self._input(node, entry.kind, entry.name, action, instruction.frees)))
        steps = run(executable, _handed_over(inputs))
        outputs = yield from _of_microbatch(steps, action.microbatch, self.count)
        for out, value in zip(program.outputs, outputs, strict=True):
            if out.kind == "saved":
                self.values[out.name, action.microbatch] = value
            elif out.kind == "step":
                self.values[out.name, ONCE] = value
            elif out.kind == "part":
                self.totals.add(out.name, action.microbatch, value)
            else:
                self.finals[out.kind, out.name] = value

    def _input(
        self, node: fx.Node, kind: str, name: str, action: Action, frees: tuple[str, ...]
    ) -> Generator[Any, Any, Any]:
        if kind == "batch" and node.name in self.given.parts:
            return self.given.parts[node.name][max(action.microbatch, 0)]  # the same in all, of what is not split
        if kind == "saved":
            value = yield from self._value(name, action.microbatch)
            if name in frees:
                self.values.pop((name, action.microbatch), None)  # the graph lets go of it at its last use
            return value
        if kind == "step":
            return (yield from self._value(name, ONCE))
        if node.name in self.given.whole:
            return self.given.whole[node.name]
        return (yield from self._value(node.name, ONCE))  # a parameter that another rank keeps

    def _value(self, name: str, microbatch: int) -> Generator[Any, Any, Any]:
        key = name, microbatch
        if key in self.posted:
            posted, instruction = self.posted[key]
            (tensors,) = yield Await(posted, instruction)
            for other, tensor in zip(instruction.values, tensors, strict=True):
                self.values[self._key(other, instruction)] = tensor
                del self.posted[self._key(other, instruction)]
        if key in self.values:
            return self.values[key]
        if name in self.totals.parts:
            return self.totals.take(name)
        return self.given.whole[name]

    def _count(self, rank: int) -> Generator[Any, Any, None]:
        """What the prologue needs of all micro-batches together."""
        program, executable = self.code.pipeline.graphs[rank, "C"], self.code.executables[rank, "C"]
        runs = []
        for microbatch in range(self.count):
            inputs = []
            for node, entry in zip(program.placeholders, program.inputs, strict=True):
                inputs.append((yield from self._input(node, entry.kind, entry.name, Action(rank, "C", microbatch), ())))
            runs.append(run(executable, inputs))
        outputs = yield from _side_by_side(runs, self.count)
        for out, value in zip(program.outputs, outputs, strict=True):
            self.values[out.name, ONCE] = value

    def _free(self, instruction: Instruction) -> None:
        for name in instruction.frees:
            self.values.pop(self._key(name, instruction), None)
            self.totals.drop(name)

    def _key(self, name: str, instruction: Instruction) -> Key:
        return name, ONCE if name in self.code.step_values else instruction.action.microbatch


def _handed_over(inputs: list[Any]) -> Any:
    """The values, of which the caller keeps none."""
    while inputs:
        yield inputs.pop(0)


def _of_microbatch(steps: Any, microbatch: int, count: int) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph, answering what it asks of its micro-batch; returns its outputs."""
    answer: list[Any] | None = None
    try:
        while True:
            request = steps.send(answer)
            answer = _local(request, microbatch, count) if is_of_microbatch(request) else (yield request)
            del request  # it holds a tensor that may die in the next step
    except StopIteration as done:
        outputs: tuple[Any, ...] = done.value
        return outputs


def _side_by_side(runs: list[Any], count: int) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph for all micro-batches, each until it needs the others; returns the outputs of the first: they are
    the same for all."""
    answers: list[list[Any] | None] = [None] * count
    while True:
        requests: list[Request] = []
        outputs: list[tuple[Any, ...]] = []
        for microbatch, steps in enumerate(runs):
            found = yield from _until_join(steps, answers[microbatch], microbatch, count)
            if isinstance(found, Request):
                requests.append(found)
            else:
                outputs.append(found)
        if outputs:
            return outputs[0]
        answers = [[value] for value in _joined(requests)]


def _until_join(steps: Any, answer: list[Any] | None, microbatch: int, count: int) -> Generator[Any, Any, Any]:
    """Go on until the other micro-batches are needed (the request) or the graph ends (its outputs)."""
    try:
        while True:
            request = steps.send(answer)
            if not is_of_microbatch(request):
                answer = yield request
            elif is_local(request.op):
                answer = _local(request, microbatch, count)
            else:
                return request
    except StopIteration as done:
        return done.value


def _joined(requests: list[Request]) -> list[torch.Tensor]:
    """The answers to what all micro-batches ask for."""
    parts, (_, _, *rest) = [request.args[0] for request in requests], requests[0].args
    if requests[0].op == ALL_GATHER:
        return [join(torch.stack(parts), *rest)] * len(parts)
    total = reduce_parts(parts, rest[0])
    return [total, *(total.clone() for _ in parts[1:])]


def is_of_microbatch(request: Any) -> bool:
    """True for what a graph asks of its own micro-batch, or of all."""
    if not isinstance(request, Request):
        return False
    return request.args[0 if request.op == COORD else 1 :][:1] == (MICROBATCH,)


def _local(request: Request, microbatch: int, count: int) -> list[Any]:
    return [local_answer(Mesh(((MICROBATCH, count),)), {MICROBATCH: microbatch}, request.op, request.args)]
