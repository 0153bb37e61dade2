"""One rank of one way of training, in a process of its own: it steps and measures its memory when it is asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.compiled import Compiled
from autopar.errors import AutoparError
from autopar.machines import Machine
from autopar.parallel.module import ParallelModule
from benchmarks.allocated import allocated
from benchmarks.planner.configurations import RANKS, Configuration, batch_of, loss_of, model_of

STEP, MEMORY = "step", "memory"  # what a rank may be asked for
# Steps of which the least counts: a thread of Gloo lets go of a buffer when it comes to run. More of them while a rank
# holds more than was said.
TRACKED, MOST_TRACKED, CLOSE = 4, 24, 1e-3

Timed = tuple[float, float]  # seconds of a step, and of them the optimizer's
Held = tuple[tuple[float, float], float]  # (bytes said of the peak, those of tensors in it), and the scratch memory's


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """One kernel that reads and writes each state once: what the simulation counts."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def serve(rank: int, configuration: Configuration, machine: Machine, store: str, pipe: Connection) -> None:
    """Compile, and send what the step was foretold to take, or why it was refused; then answer until the pipe closes.

    All ranks refuse the same.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        way = _Way.of(configuration)
    except AutoparError as error:
        pipe.send(str(error).splitlines()[0])
        return
    pipe.send(way.compiled.time(machine))
    for asked in _asked(pipe):
        pipe.send(way.timed() if asked == STEP else way.held(rank))


def _asked(pipe: Connection) -> Iterator[str]:
    """What the process that started this one asks for, until it has closed its end."""
    try:
        while True:
            yield pipe.recv()
    except EOFError:
        return


@dataclass(frozen=True, slots=True)
class _Way:
    model: ParallelModule
    optimizer: torch.optim.Optimizer
    batch: tuple[Any, ...]
    compiled: Compiled

    @classmethod
    def of(cls, configuration: Configuration) -> _Way:
        """Raises AutoparError for a way that is refused."""
        name, batch = configuration.model, batch_of(configuration.model)
        model = autopar.parallelize(
            model_of(name), configuration.mesh, loss_fn=loss_of(name), device="cpu", **configuration.options
        )
        return cls(model, adamw(model.parameters()), batch, model.prepare(*batch))

    def timed(self) -> Timed:
        """A step of all ranks."""
        dist.barrier()
        begun = time.perf_counter()
        self.model.forward_backward(*self.batch)
        updating = time.perf_counter()
        self.optimizer.step()
        updated = time.perf_counter()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun, updated - updating

    def held(self, rank: int) -> Held:
        """All ranks stop together."""
        said, seen = self.compiled.memory(rank, adamw, device="cpu").peak, []
        while True:
            seen.append(allocated(self.model, self.optimizer, *self.batch))
            self.optimizer.zero_grad()
            least = min(one.tensors for one in seen)
            more = torch.tensor(int(least > (1 + CLOSE) * said))
            dist.all_reduce(more)
            if len(seen) == MOST_TRACKED or (len(seen) >= TRACKED and not more):
                return (said, least), min(one.all for one in seen) - least
