"""Training steps of ours beside those of what people write by hand, in one call, interleaved.

    timeout 300 .venv/bin/python -m benchmarks.compare [--steps 20] [--only tp=2]

A GPT (4 layers, width 256, 128 tokens, batch 16, vocabulary 8192, one thread a rank), AdamW; a step is forward, backward,
optimizer.step and zero_grad. On 2 Gloo ranks dp=2 beside DistributedDataParallel, and tp=2 beside DTensor's
parallelize_module, without and with its loss_parallel; on one rank ours beside eager. Both sides live in the same
processes and take turns, in an order that swaps from pair to pair, so that what else the machine does meets both alike;
the ratio is the median of the pairs' ratios. Memory is measured in fresh processes, one side each, that then train as above:
the peak of the resident set, whole and above what was there before the model. With a GPU: one rank over NCCL
beside eager and torch.compile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, GPTConfig  # noqa: E402

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 4, 4, 256, 128, 16, 8192
WARMUP = 3
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


def plain(model: nn.Module, x: Tensor, y: Tensor, context: Callable[[], contextlib.AbstractContextManager] | None = None) -> Step:
    """A training step as people write it."""
    optimizer = optimizer_of(model)

    def step() -> Tensor:
        with context() if context else contextlib.nullcontext():
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
    step = plain(DistributedDataParallel(model_of().to(device), gradient_as_bucket_view=True), x, y)

    def global_loss() -> Tensor:
        return step()

    return global_loss


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
    return plain(model, *batch_of(device), sharded_loss if loss_parallel else None)


@dataclass(frozen=True)
class Case:
    """Ours and a peer on one mesh."""

    name: str
    mesh: str
    ranks: int
    peer: str
    device: str = "cpu"

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
    Case("dp=2", "dp=2", 2, "DDP"),
    Case("tp=2", "tp=2", 2, "DTensor"),
    Case("tp=2", "tp=2", 2, "DTensor loss_parallel"),
    Case("dp=1", "dp=1", 1, "eager"),
)
GPU_CASES = (Case("dp=1", "dp=1", 1, "eager", "cuda"), Case("dp=1", "dp=1", 1, "torch.compile", "cuda"))


# -- measuring -------------------------------------------------------------------------------------------------------


def worker(rank: int, case: Case, side: str | None, steps: int, folder: str) -> None:
    """One rank. With a `side`: its memory; with None: the time of both."""
    torch.set_num_threads(1)
    backend = "nccl" if case.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    result = times(case, steps) if side is None else memory(case.maker(side), case.device)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def times(case: Case, steps: int) -> dict[str, list[float]]:
    """Seconds of each step, and the losses, of both sides in turns."""
    sides = {"ours": case.maker("ours")(), case.peer: case.maker(case.peer)()}
    found: dict[str, list[float]] = {name: [] for side in sides for name in (side, f"loss {side}")}
    for i in range(WARMUP + steps):
        order = list(sides) if i % 2 else list(sides)[::-1]
        for side in order:
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            loss = sides[side]()
            if case.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if case.peer == "DDP" and side == "DDP":
                dist.all_reduce(loss, op=dist.ReduceOp.AVG if case.device == "cuda" else dist.ReduceOp.SUM)
                loss = loss / case.ranks
            found[f"loss {side}"].append(loss.item())
            if i >= WARMUP:
                found[side].append(seconds)
    return found


def memory(make: Maker, device: str) -> dict[str, float]:
    """MiB at the peak of some steps, whole, and above what was there before the model."""
    if device == "cuda":
        step = make()
        for _ in range(WARMUP):
            step()
        peak = torch.cuda.max_memory_allocated() / 2**20
        return {"peak": peak, "above": peak}
    before = resident("VmRSS")
    step = make()
    for _ in range(WARMUP + 2):
        step()
    peak = resident("VmHWM")
    return {"peak": peak, "above": peak - before}


def resident(what: str) -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = re.search(rf"{what}:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def launch(case: Case, side: str | None, steps: int) -> list[dict]:
    """The results of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, args=(case, side, steps, folder), nprocs=case.ranks, start_method="spawn")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(case.ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    for case in GPU_CASES if cuda else CPU_CASES:
        if args.only and args.only not in f"{case.name} {case.peer}":
            continue
        ranks = launch(case, None, args.steps)
        found = ranks[0]
        # a step takes as long as its slowest rank
        seconds = {side: [max(r[side][i] for r in ranks) for i in range(args.steps)] for side in ("ours", case.peer)}
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds[case.peer], strict=True))
        line = f"{case.name:6} {case.peer:22} {statistics.median(seconds['ours'])*1e3:7.1f} {statistics.median(seconds[case.peer])*1e3:7.1f} {ratio:6.3f}"
        line += f"  loss {found['loss ours'][-1]:.6f} {found['loss ' + case.peer][-1]:.6f}"
        print(line, flush=True)
        if not args.no_memory:
            m = {side: [max(r[k] for r in launch(case, side, 0)) for k in ("peak",)] for side in ("ours", case.peer)}
            print("   mem", m, flush=True)
    print(torch.__version__, platform.platform(), date.today())


if __name__ == "__main__":
    main()
