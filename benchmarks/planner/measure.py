"""Train in every way of one model, in turns, and say what the programs were foretold to take."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from autopar.machines import Machine
from autopar.planning import StepTime
from benchmarks.planner.configurations import RANKS, Configuration
from benchmarks.planner.rank import MEMORY, STEP, Held, Timed, serve

WARMUP, LEAST_ROUNDS = 1, 3
TURN = 3  # steps; the first of them, after those of other processes, does not count


@dataclass(frozen=True, slots=True)
class Row:
    """A way of training: seconds and bytes of the peak, predicted and measured. scratch: bytes by which kernels raise
    that peak. refused: why it was not run."""

    name: str
    model: str
    predicted: float = 0.0
    measured: float = 0.0
    held: tuple[float, float] = (0.0, 0.0)
    scratch: float = 0.0
    parts: StepTime | None = None
    optimizer: float = 0.0
    steps: int = 0
    refused: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        return self.held[0] / self.held[1] - 1


@dataclass(slots=True)
class Side:
    """One way, in processes of its own. pipes: to its ranks. answer: what each step was foretold to take, or why the
    way was refused. steps: of each the times on all ranks. held: on each rank."""

    configuration: Configuration
    pipes: Sequence[Connection]
    answer: StepTime | str
    steps: list[list[Timed]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def ask(self, what: str) -> list[Any]:
        """The answers of all ranks."""
        for pipe in self.pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self.pipes]

    def row(self) -> Row:
        """A step takes as long as its slowest rank."""
        name, model = str(self.configuration), self.configuration.model
        if isinstance(self.answer, str):
            return Row(name, model, refused=self.answer)
        measured, updated = (statistics.median(max(rank[i] for rank in step) for step in self.steps) for i in (0, 1))
        held = max((pair for pair, _ in self.held), key=lambda pair: abs(pair[0] / pair[1] - 1))
        scratch = max(each for _, each in self.held)
        predicted = self.answer.total / 1e6
        return Row(name, model, predicted, measured, held, scratch, self.answer, updated, len(self.steps))


def rows_of(chosen: Sequence[Configuration], machine: Machine, seconds: float) -> list[Row]:
    """All ways of one model, in about so many seconds of steps."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or the profiler says when it starts
    with started(chosen, machine) as sides:
        ran = [side for side in sides if not isinstance(side.answer, str)]
        take_turns(ran, seconds)
        for side in ran:
            side.held = side.ask(MEMORY)
        return [side.row() for side in sides]


@contextmanager
def started(chosen: Sequence[Configuration], machine: Machine) -> Iterator[list[Side]]:
    """The processes of all ways, ready to step. They are forks of one that has imported what they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])
    processes: list[Any] = []
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, configuration in enumerate(chosen):
            pipes = []
            for rank in range(RANKS):
                own, other = context.Pipe()
                arguments = (rank, configuration, machine, str(Path(folder, str(i))), other)
                processes.append(context.Process(target=serve, args=arguments, daemon=True))
                processes[-1].start()
                other.close()
                pipes.append(own)
            answers = [pipe.recv() for pipe in pipes]
            refused = next((answer for answer in answers if isinstance(answer, str)), None)
            sides.append(Side(configuration, pipes, refused or answers[0]))
        try:
            yield sides
        finally:  # a rank ends when nobody can ask it any more
            for pipe in (pipe for side in sides for pipe in side.pipes):
                pipe.close()
            for process in processes:
                process.join()


def take_turns(sides: Sequence[Side], seconds: float) -> None:
    """Some steps of each way, round after round; whose turn is first goes round."""
    end, i = time.perf_counter() + seconds, 0
    while i < WARMUP + LEAST_ROUNDS or time.perf_counter() < end:
        for k in range(len(sides)):
            side = sides[(i + k) % len(sides)]
            steps = [side.ask(STEP) for _ in range(TURN)]
            if i >= WARMUP:
                side.steps += steps[1:]
        i += 1
