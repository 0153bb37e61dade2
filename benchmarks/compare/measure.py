"""Times and memory of the sides of a case, in fresh processes."""

from __future__ import annotations

import pickle
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.compare.models import MICROBATCHES, Step, batch_of, loss_fn, model_of
from benchmarks.compare.peers import PEERS, ours
from benchmarks.records import Figure

WARMUP, LEAST_STEPS = 2, 4
LOSS_TOLERANCE = 1e-4
# Sides whose loss is that of this rank's part of the batch, or of the last stage's.
PARTIAL = ("DDP", "FSDP", "pipelining", "zigzag", "Ulysses", "all-to-all")
Maker = Callable[[], Step]


@dataclass(frozen=True)
class Case:
    """Ours and its peers for a model on one mesh. sequence and what follows: how ours is called."""

    model: str
    mesh: str
    ranks: int
    peers: tuple[str, ...]
    device: str = "cpu"
    sequence: bool = False
    inductor: bool = False
    zero: int | None = None
    recompute: str = "none"
    attention: str = "auto"
    offload: str | None = None

    @property
    def microbatches(self) -> int | None:
        return MICROBATCHES if "pp" in self.mesh else None

    @property
    def sides(self) -> tuple[str, ...]:
        return ("ours", *self.peers)

    @property
    def options(self) -> str:
        """What ours is called with beside the mesh."""
        found = ["sequence_parallel"] * self.sequence + ["inductor"] * self.inductor
        found += [f"zero={self.zero}"] * bool(self.zero) + [f"recompute={self.recompute}"] * (self.recompute != "none")
        found += [f"attention={self.attention}"] * (self.attention != "auto")
        found += [f"offload={self.offload}"] * bool(self.offload)
        return " ".join(found + [f"microbatches={self.microbatches}"] * bool(self.microbatches))

    def maker(self, side: str) -> Maker:
        if side != "ours":
            return lambda: PEERS[side](self.model, self.device)
        options = {
            "sequence_parallel": self.sequence,
            "compile": "inductor" if self.inductor else "auto",
            "microbatches": self.microbatches,
            "zero": self.zero,
            "recompute": self.recompute,
            "attention": self.attention,
            "offload": self.offload,
        }
        return lambda: ours(self.model, self.mesh, self.device, options)


@dataclass
class Times:
    """Of every step of one side: wall seconds, CPU seconds of this process with all its threads, and the loss."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


def worker(rank: int, case: Case, side: str | None, steps: int, seconds: float, folder: str) -> None:
    """One rank. With a `side`: its memory; with None: the times of both."""
    torch.set_num_threads(1)
    backend = "nccl" if case.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    result = times(case, steps, seconds) if side is None else memory(case.maker(side), case.device)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def times(case: Case, steps: int, seconds: float) -> dict[str, Times]:
    """All sides in turns, after some steps that nobody counts. Whose turn is first goes round."""
    sides = {side: case.maker(side)() for side in case.sides}
    found = {side: Times() for side in sides}
    expected = plain_loss(case)
    started = time.perf_counter()
    for i in range(WARMUP + steps):
        if i == WARMUP:
            found = {side: Times() for side in sides}
        if i >= WARMUP + LEAST_STEPS and late(started + seconds, case.device):
            break
        for k in range(len(sides)):
            side = case.sides[(i + k) % len(sides)]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = sides[side]()
            if case.device == "cuda":
                torch.cuda.synchronize()
            found[side].wall.append(time.perf_counter() - wall)
            found[side].cpu.append(time.process_time() - cpu)
            if side.startswith(PARTIAL):
                dist.all_reduce(loss)
                loss /= case.ranks
            found[side].loss.append(loss.item())
            assert i or abs(loss.item() - expected) < LOSS_TOLERANCE, f"{side}: loss {loss}, one device has {expected}"
    return found


def plain_loss(case: Case) -> float:
    """Of the first step, on one device without any of the sides."""
    with torch.no_grad():
        return loss_fn(model_of(case.model).to(case.device), *batch_of(case.model, case.device)).item()


def late(end: float, device: str) -> bool:
    """Is it past this time? The same answer on every rank."""
    answer = torch.tensor(time.perf_counter() > end, dtype=torch.int, device=device)
    dist.broadcast(answer, src=0)
    return bool(answer)


def memory(make: Maker, device: str) -> tuple[float, float]:
    """MiB at the peak of some steps: of the process, and above what it had before there was a model."""
    before = resident("VmRSS")
    step = make()
    for _ in range(WARMUP + LEAST_STEPS):
        step()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
        return peak, peak
    peak = resident("VmHWM")
    return peak, peak - before


def resident(what: str) -> float:
    """MiB of this process, from Linux."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def launch(case: Case, side: str | None, steps: int = 0, seconds: float = 0) -> list[Any]:
    """The results of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, args=(case, side, steps, seconds, folder), nprocs=case.ranks, start_method="spawn")
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(case.ranks)]


def ratio(ours: list[float], peer: list[float]) -> str:
    """The median of the pairs' ratios."""
    return f"{statistics.median(a / b for a, b in zip(ours, peer, strict=True)):.3f}"


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f}"


def measure(case: Case, steps: int, seconds: float) -> Iterator[tuple[tuple[str, ...], tuple[Figure, ...]]]:
    """One row for each peer, and its figures as they are recorded."""
    ranks = launch(case, None, steps, seconds)
    # A step takes as long as its slowest rank; the CPU works for all.
    wall = {side: [max(step) for step in zip(*(rank[side].wall for rank in ranks), strict=True)] for side in case.sides}
    cpu = {side: [sum(step) for step in zip(*(rank[side].cpu for rank in ranks), strict=True)] for side in case.sides}
    loss = {side: f"{ranks[0][side].loss[-1]:.6f}" for side in case.sides}
    peak = {side: max(launch(case, side)) for side in case.sides}
    size = {side: f"{whole:.0f} (+{above:.0f})" for side, (whole, above) in peak.items()}
    for peer in case.peers:
        name = f"{' '.join(filter(None, (case.model, case.mesh, case.options)))} beside {peer}"
        figures = tuple(
            Figure(name, metric, unit, of["ours"], of[peer], "<=1.0")
            for metric, unit, of in (
                ("time", "ms", {side: statistics.median(times) * 1e3 for side, times in wall.items()}),
                ("CPU time", "ms", {side: statistics.median(times) * 1e3 for side, times in cpu.items()}),
                ("memory", "MiB", {side: whole for side, (whole, _) in peak.items()}),
            )
        )
        row = (
            case.model, case.mesh, case.options, peer, milliseconds(wall["ours"]), milliseconds(wall[peer]),
            ratio(wall["ours"], wall[peer]), ratio(cpu["ours"], cpu[peer]), size["ours"], size[peer],
            f"{peak['ours'][0] / peak[peer][0]:.3f}", loss["ours"], loss[peer], str(len(wall[peer])),
        )  # fmt: skip
        yield row, figures
