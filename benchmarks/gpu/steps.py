"""Whole training steps: ours beside eager, torch.compile, DDP and FSDP2; and estimated memory beside what was held."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.ops.measure import human
from benchmarks.compare.models import Step
from benchmarks.gpu.models import GPT, GPTConfig, Llama
from benchmarks.measured import measure

Side = Callable[[nn.Module, Tensor, Tensor, str], Step]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Cases = dict[str, tuple[Callable[[], nn.Module], int, int, int]]


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return loss


def cases(device: str) -> Cases:
    """By name: the model, rows, positions, and vocabulary."""
    if device == "cpu":
        return {"GPT": (lambda: GPT(GPTConfig(32, 16, 1, 2, 16)), 2, 16, 32)}
    return {
        "GPT-2 124M": (lambda: GPT(GPTConfig(50304, 1024, 12, 12, 768)), 16, 1024, 50304),
        "Llama slice": (lambda: Llama(4, 4096, 32, 8, 14336, 32000, 2048), 4, 2048, 32000),
    }


def optimizer_of(model: nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")


def ours(loss_fn: Loss = token_loss, **options: Any) -> Side:
    """A step of ours in bf16."""

    def side(model: nn.Module, x: Tensor, y: Tensor, device: str) -> Step:
        parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device=device, precision="bf16", **options)
        optimizer = optimizer_of(parallel, device)

        def step() -> Tensor:
            loss: Tensor = parallel.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return side


def plain(
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    loss_fn: Loss = token_loss,
    inside: Callable[[], Any] = contextlib.nullcontext,
) -> Side:
    """A step under autocast. inside: a context of the forward pass."""

    def side(model: nn.Module, x: Tensor, y: Tensor, device: str) -> Step:
        wrapped = wrap(model)
        optimizer = optimizer_of(wrapped, device)

        def step() -> Tensor:
            with torch.autocast(device, torch.bfloat16), inside():
                loss = loss_fn(wrapped, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return side


def steps(device: str) -> None:
    """Ours as it is, with CUDA graphs, op by op and with Inductor, beside eager and torch.compile, in bf16."""
    sides = {"eager": plain(), "torch.compile": plain(torch.compile), "autopar": ours()}
    sides["autopar, cuda graphs"] = ours(cuda_graphs=True)
    sides["autopar, op by op"] = ours(compile="executor")
    sides["autopar, inductor"] = ours(compile="inductor")
    dry = ("eager", "autopar", "autopar, op by op")
    table(device, sides if device == "cuda" else {name: sides[name] for name in dry})


def peers(device: str) -> None:
    """Ours beside DDP and FSDP2, over a process group of one rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(model)

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        table(device, {"DDP": plain(DistributedDataParallel), "FSDP2": plain(sharded), "autopar": ours()})
        dist.destroy_process_group()


def table(device: str, sides: dict[str, Side], of: Cases | None = None) -> None:
    """A row of each side for each case, by default those of `cases`."""
    print(
        "| model | side | ms | beside the first | tokens a second | peak memory | loss |\n|---|---|---|---|---|---|---|"
    )
    for name, (make, rows, positions, vocabulary) in (of or cases(device)).items():
        first, losses = 0.0, []
        for side, build in sides.items():
            milliseconds, peak, loss = _timed(make, build, (rows, positions), vocabulary, device)
            first, losses = first or milliseconds, [*losses, loss]
            rate = rows * positions / milliseconds * 1e3
            cells = (name, side, f"{milliseconds:.1f}", f"{milliseconds / first:.3f}", f"{rate:.0f}", human(peak))
            print(f"| {' | '.join(cells)} | {loss:.4f} |", flush=True)
        assert max(losses) - min(losses) < 0.02 * max(losses), f"{name}: the losses part: {losses}"


def _timed(
    make: Callable[[], nn.Module], build: Side, shape: tuple[int, int], vocabulary: int, device: str
) -> tuple[float, int, float]:
    """(Milliseconds of a step, bytes at the peak, the loss in the end)."""
    torch.manual_seed(0)
    x, y = (torch.randint(vocabulary, shape, device=device) for _ in range(2))
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        model = make()
    step, times, loss = build(model, x, y, device), [], torch.zeros(())
    for _ in range(15 if device == "cuda" else 4):
        started = time.perf_counter()
        loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return statistics.median(times[len(times) // 3 :]), peak, loss.item()


def memory(device: str) -> None:
    """`Compiled.memory` beside what the device held."""
    print("| model | options | estimated | held | difference |\n|---|---|---|---|---|")
    wrong = []
    for name, (make, rows, positions, vocabulary) in cases(device).items():
        for options in ({}, {"precision": "bf16"}, {"precision": "bf16", "recompute": "full"}):
            torch.manual_seed(0)
            batch = tuple(torch.randint(vocabulary, (rows, positions), device=device) for _ in range(2))
            with torch.device(device):
                made = make()
            model = autopar.parallelize(made, "dp=1", loss_fn=token_loss, device=device, **options)  # type: ignore[arg-type]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            model.forward_backward(*batch)
            optimizer.step()
            optimizer.zero_grad()
            held = measure(model, optimizer, *batch).peak
            estimated = model.prepare(*batch).memory(0, torch.optim.AdamW).peak
            said = " ".join(f"{key}={value}" for key, value in options.items())
            error = (estimated - held) / held
            print(f"| {name} | {said} | {human(estimated)} | {human(held)} | {error:+.1%} |", flush=True)
            wrong += [f"{name} {said}"] * (abs(error) > 0.05)
            del model, optimizer, made, batch
    assert not wrong, f"more than 5 % beside what was held: {wrong}"
