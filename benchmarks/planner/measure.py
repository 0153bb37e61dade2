"""Train in every way of one model, in turns, and say what the programs were foretold to take."""

from __future__ import annotations

import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar.errors import AutoparError
from autopar.machines import Machine
from autopar.planning import StepTime
from benchmarks.allocated import allocated
from benchmarks.compare.measure import late
from benchmarks.planner.configurations import RANKS, Configuration, batch_of, loss_of, model_of

WARMUP, LEAST_ROUNDS = 2, 6
# Steps of which the least counts: a thread of Gloo lets go of a buffer when it comes to run. More of them while a rank
# holds more than was said.
TRACKED, MOST_TRACKED, CLOSE = 4, 24, 1e-3


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
    """One way on this rank: its step and its times. optimizer: the part of each that the optimizer's step takes."""

    step: Callable[[], float]
    predicted: StepTime
    held: tuple[float, float]
    scratch: float
    times: list[float]
    optimizer: list[float]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """One kernel that reads and writes each state once: what the simulation counts."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def rows_of(chosen: Sequence[Configuration], machine: Machine, seconds: float) -> list[Row]:
    """All ways of one model, in about so many seconds of steps."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or the profiler says when it starts
    with tempfile.TemporaryDirectory() as folder:
        arguments = (list(chosen), machine, seconds, folder)
        mp.start_processes(worker, args=arguments, nprocs=RANKS, start_method="spawn")
        ranks = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    return [row_of(configuration, [found[i] for found in ranks]) for i, configuration in enumerate(chosen)]


def row_of(configuration: Configuration, ranks: Sequence[Side | str]) -> Row:
    """What the ranks found: a step takes as long as its slowest rank."""
    name, model = str(configuration), configuration.model
    sides = [side for side in ranks if isinstance(side, Side)]
    if len(sides) < len(ranks):
        return Row(name, model, refused=next(side for side in ranks if isinstance(side, str)))
    times = [max(step) for step in zip(*(side.times for side in sides), strict=True)]
    optimizer = [max(step) for step in zip(*(side.optimizer for side in sides), strict=True)]
    held = max((side.held for side in sides), key=lambda pair: abs(pair[0] / pair[1] - 1))
    parts = sides[0].predicted
    measured, updated = statistics.median(times), statistics.median(optimizer)
    scratch = max(side.scratch for side in sides)
    return Row(name, model, parts.total / 1e6, measured, held, scratch, parts, updated, len(times))


def worker(rank: int, chosen: list[Configuration], machine: Machine, seconds: float, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    sides = [side_of(rank, configuration, machine) for configuration in chosen]
    take_turns([side for side in sides if isinstance(side, Side)], seconds)
    kept = [side if isinstance(side, str) else without_step(side) for side in sides]
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(kept))
    dist.barrier()
    dist.destroy_process_group()


def side_of(rank: int, configuration: Configuration, machine: Machine) -> Side | str:
    """Compile, predict and measure memory; what is refused says why. All ranks refuse the same."""
    name, batch = configuration.model, batch_of(configuration.model)
    try:
        model = autopar.parallelize(
            model_of(name), configuration.mesh, loss_fn=loss_of(name), device="cpu", **configuration.options
        )
        compiled = model.prepare(*batch)
    except AutoparError as error:
        return str(error).splitlines()[0]
    optimizer, spent = adamw(model.parameters()), list[float]()

    def step() -> float:
        model.forward_backward(*batch)
        begun = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begun)
        optimizer.zero_grad()
        return spent[-1]

    step()
    held, scratch = held_in(model, optimizer, batch, compiled.memory(rank, adamw, device="cpu").peak)
    return Side(step, compiled.time(machine), held, scratch, [], [])


def held_in(model: Any, optimizer: torch.optim.Optimizer, batch: Any, said: int) -> tuple[tuple[float, float], float]:
    """(What was said of this rank's peak, and the tensors in it), and the scratch memory of kernels. All ranks stop
    together."""
    seen = []
    while True:
        seen.append(allocated(model, optimizer, *batch))
        optimizer.zero_grad()
        least = min(one.tensors for one in seen)
        more = torch.tensor(int(least > (1 + CLOSE) * said))
        dist.all_reduce(more)
        if len(seen) == MOST_TRACKED or (len(seen) >= TRACKED and not more):
            return (said, least), min(one.all for one in seen) - least


def without_step(side: Side) -> Side:
    """What can be pickled of it; nobody asks for the timeline."""
    return Side(float, side.predicted, side.held, side.scratch, side.times, side.optimizer)


def take_turns(sides: Sequence[Side], seconds: float) -> None:
    """A step of each way, round after round; whose turn is first goes round."""
    end = time.perf_counter() + seconds
    for i in range(WARMUP + 10**6):
        if i >= WARMUP + LEAST_ROUNDS and late(end, "cpu"):
            break
        for k in range(len(sides)):
            side = sides[(i + k) % len(sides)]
            dist.barrier()
            begun = time.perf_counter()
            optimizer = side.step()
            if i >= WARMUP:
                side.times.append(time.perf_counter() - begun)
                side.optimizer.append(optimizer)
