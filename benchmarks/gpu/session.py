"""A rank over NCCL, and what a warm step reads on the host."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import autopar
from benchmarks.compare.models import batch_of, loss_fn, model_of, optimizer_of, plain

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {}),
    ("bf16", {"precision": "bf16"}),
    ("fp16", {"precision": "fp16"}),
    ("recompute", {"recompute": "full"}),
    ("micro-batches", {"microbatches": 4}),
    ("inductor", {"compile": "inductor"}),
    ("op by op", {"compile": "executor"}),
    ("cuda graphs", {"cuda_graphs": True}),
)
ONE_READ = ("fp16",)  # whether gradients overflowed, as `GradScaler.step` reads it
CLOSE = 1e-4  # relative, float32


def reads(device: str) -> None:
    """A warm step while torch tells of all that waits for the GPU. Where a step does so is printed."""
    failed = []
    for name, options in OPTIONS[: len(OPTIONS) if device == "cuda" else 2]:
        model = autopar.parallelize(model_of("gpt"), "dp=1", loss_fn=loss_fn, device=device, **options)
        x, y = _batch(device)
        optimizer = optimizer_of(model)
        for _ in range(2):
            model.forward_backward(x, y)
            optimizer.step()
            optimizer.zero_grad()
        places = _waits(lambda model=model, x=x, y=y: model.forward_backward(x, y), device)  # type: ignore[misc]
        if len(places) > (name in ONE_READ):
            failed.append(name)
        print(f"- {name}: {', '.join(places) if places else 'no read'}")
    if failed:
        raise SystemExit(f"a warm step waits for the GPU: {failed}")


def _batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a step: those of `benchmarks.compare`, on the CPU a few, as many have no fast product in bf16."""
    x, y = batch_of("gpt", device)
    return (x, y) if device == "cuda" else (x[:2, :16].contiguous(), y[:2, :16].contiguous())


def _waits(step: Callable[[], object], device: str) -> list[str]:
    """The lines at which a step waits for the GPU."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        step()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in said if "synchronizing CUDA operation" in str(one.message)]
    return [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in waits]


def nccl(device: str) -> None:
    """Steps of a rank that has a process group, beside a plain loop."""
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = autopar.parallelize(model_of("gpt"), "dp=1", loss_fn=loss_fn, device=device)
        other, batch = model_of("gpt").to(device), _batch(device)
        step, optimizer = plain(other, *batch), optimizer_of(model)
        print(f"{backend}\n\n| step | autopar | plain |\n|---|---|---|")
        worst = 0.0
        for i in range(5 if device == "cuda" else 2):
            ours, theirs = model.forward_backward(*batch).item(), step().item()
            optimizer.step()
            optimizer.zero_grad()
            worst = max(worst, abs(ours - theirs) / abs(theirs))
            print(f"| {i} | {ours:.6f} | {theirs:.6f} |")
        dist.destroy_process_group()
    print(f"\nlargest relative difference: {worst:.1e}")
    assert worst < CLOSE, f"more than float32 rounding: {worst}"
