"""Training steps of ours beside those of what people write by hand, in one call, interleaved.

    timeout 300 .venv/bin/python -m benchmarks.compare [--steps 20] [--seconds 60] [--only tp=2]

A GPT (4 layers, width 256, 128 tokens, batch 16, vocabulary 8192, one thread a rank) and AdamW; a step is forward,
backward, optimizer.step and zero_grad. On 2 Gloo ranks dp=2 beside DistributedDataParallel, and tp=2 beside DTensor's
parallelize_module, without and with its loss_parallel; on one rank ours beside eager. With a GPU: one rank over NCCL
beside eager and torch.compile.

All sides live in the same processes and take turns, and whose turn is first goes round, so that what else the machine
does meets all alike. A ratio is the median of the ratios of simultaneous steps: of the slowest rank's wall time, and of
the CPU time of all ranks. Memory is measured in fresh processes, one side each: the peak of the resident set of the
largest rank, and in brackets how much of it came after the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, GPTConfig  # noqa: E402

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 4, 4, 256, 128, 16, 8192
WARMUP, LEAST_STEPS = 2, 4
Step = Callable[[], Tensor]
Maker = Callable[[], Step]


def model_of() -> GPT:
    """The same weights on every rank and side."""
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH))


def batch_of(device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# -- the sides: each makes a function that trains one step and returns the loss --------------------------------------


def ours(mesh: str, device: str) -> Step:
    import autopar

    model = autopar.parallelize(model_of(), mesh, loss_fn=loss_fn, device=device)
    x, y = batch_of(device)
    optimizer = optimizer_of(model)

    def step() -> Tensor:
        loss: Tensor = model.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain(model: nn.Module, x: Tensor, y: Tensor, context: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """A training step as people write it."""
    optimizer = optimizer_of(model)

    def step() -> Tensor:
        with context():
            loss = loss_fn(model, x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager(device: str) -> Step:
    return plain(model_of().to(device), *batch_of(device))


def compiled(device: str) -> Step:
    return plain(torch.compile(model_of().to(device)), *batch_of(device))  # type: ignore[arg-type]


def data_parallel(device: str) -> Step:
    """DistributedDataParallel, each rank on its half of the batch; gradients are views of the buckets."""
    from torch.nn.parallel import DistributedDataParallel

    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch_of(device))
    return plain(DistributedDataParallel(model_of().to(device), gradient_as_bucket_view=True), x, y)


def tensor_parallel(device: str, loss_parallel: bool) -> Step:
    """Megatron's layout by hand: columns, then rows; embedding and head by vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel import loss_parallel as sharded_loss

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = model_of().to(device)
    logits = Shard(-1) if loss_parallel else Replicate()
    styles = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=not loss_parallel),
    }
    parallelize_module(model, mesh, styles)
    model.head.weight = model.tokens.weight
    for block in model.blocks:
        block.attn.heads //= mesh.size()
    return plain(model, *batch_of(device), sharded_loss if loss_parallel else contextlib.nullcontext)


@dataclass(frozen=True)
class Case:
    """Ours and its peers on one mesh."""

    mesh: str
    ranks: int
    peers: tuple[str, ...]
    device: str = "cpu"

    @property
    def sides(self) -> tuple[str, ...]:
        return ("ours", *self.peers)

    def maker(self, side: str) -> Maker:
        if side == "ours":
            return lambda: ours(self.mesh, self.device)
        return {
            "eager": lambda: eager(self.device),
            "torch.compile": lambda: compiled(self.device),
            "DDP": lambda: data_parallel(self.device),
            "DTensor": lambda: tensor_parallel(self.device, loss_parallel=False),
            "DTensor loss_parallel": lambda: tensor_parallel(self.device, loss_parallel=True),
        }[side]


CPU_CASES = (
    Case("dp=2", 2, ("DDP",)),
    Case("tp=2", 2, ("DTensor", "DTensor loss_parallel")),
    Case("dp=1", 1, ("eager",)),
)
GPU_CASES = (Case("dp=1", 1, ("eager", "torch.compile"), "cuda"),)


# -- measuring -------------------------------------------------------------------------------------------------------


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
            if side == "DDP":  # of this rank's half of the batch
                dist.all_reduce(loss)
                loss /= case.ranks
            found[side].loss.append(loss.item())
    return found


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


def measure(case: Case, steps: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """One row for each peer."""
    ranks = launch(case, None, steps, seconds)
    # A step takes as long as its slowest rank; the CPU works for all.
    wall = {side: [max(step) for step in zip(*(rank[side].wall for rank in ranks), strict=True)] for side in case.sides}
    cpu = {side: [sum(step) for step in zip(*(rank[side].cpu for rank in ranks), strict=True)] for side in case.sides}
    loss = {side: f"{ranks[0][side].loss[-1]:.6f}" for side in case.sides}
    peak = {side: max(launch(case, side)) for side in case.sides}
    size = {side: f"{whole:.0f} (+{above:.0f})" for side, (whole, above) in peak.items()}
    for peer in case.peers:
        yield (
            case.mesh, peer, milliseconds(wall["ours"]), milliseconds(wall[peer]), ratio(wall["ours"], wall[peer]),
            ratio(cpu["ours"], cpu[peer]), size["ours"], size[peer], f"{peak['ours'][0] / peak[peer][0]:.3f}",
            loss["ours"], loss[peer], str(len(wall[peer])),
        )  # fmt: skip


HEAD = (
    "mesh", "peer", "ours ms", "peer ms", "time", "CPU time", "ours MiB", "peer MiB", "memory", "ours loss",
    "peer loss", "steps",
)  # fmt: skip


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each side")
    parser.add_argument(
        "--seconds", type=float, default=25, help="of each mesh: on a busy machine there are fewer steps"
    )
    parser.add_argument("--only", default="", help="part of a mesh or a peer's name")
    args = parser.parse_args()
    cases = [
        case
        for case in (GPU_CASES if torch.cuda.is_available() else CPU_CASES)
        if args.only in f"{case.mesh} {' '.join(case.peers)}"
    ]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(f"{date.today()}  torch {torch.__version__}, {platform.machine()}, {where}, load {os.getloadavg()[0]:.1f}")
    print(f"python -m benchmarks.compare {' '.join(sys.argv[1:])}", flush=True)
    started = time.perf_counter()
    print(line(HEAD) + "\n" + line(["---"] * len(HEAD)), flush=True)
    for case in cases:
        for row in measure(case, args.steps, args.seconds):
            print(line(row), flush=True)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
