"""What waits in the host's memory: the same steps as without, the memory of the device, and time beside torch's own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopar
from benchmarks.gpu.models import Llama, zoo
from benchmarks.gpu.steps import cases as timed
from benchmarks.gpu.steps import ours, plain, table
from benchmarks.measured import measure

CLOSE = 2e-5  # of weights after steps of AdamW on a CPU's cores, relative to their norm: its kernel rounds otherwise
STEPS = 5
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("activations", {"offload": "activations"}),
    ("activations, a layer ahead", {"offload": "activations", "horizon": 1}),
    ("activations, half", {"offload": {"activations": 0.5}}),
    ("activations, full recomputation", {"offload": "activations", "recompute": "full"}),
    ("activations, micro-batches", {"offload": "activations", "microbatches": 2}),
    ("optimizer", {"offload": "optimizer"}),
    ("parameters", {"offload": "parameters"}),
    ("parameters, two layers ahead", {"offload": "parameters", "horizon": 2}),
    ("parameters, full recomputation", {"offload": "parameters", "recompute": "full"}),
    ("parameters and activations", {"offload": ["parameters", "activations"]}),
)
TIMED: dict[str, dict[str, Any]] = {
    "activations": {"offload": "activations"},
    "recompute": {"recompute": "full"},
    "recompute, activations": {"recompute": "full", "offload": "activations"},
    "optimizer": {"offload": "optimizer"},
    "recompute, activations, optimizer": {"recompute": "full", "offload": ["activations", "optimizer"]},
}
Made = tuple[Any, Any, tuple[Tensor, ...]]
Losses = list[Tensor]


def offload(device: str) -> None:
    """Each mode beside the same options without it: losses and the first gradients to the bit, weights after some
    steps of AdamW (to the bit where it steps on the device), and the peak of the device beside its estimate."""
    print(f"{_link(device)}\n")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the same sums in each run, as torch wants it
    os.environ["AUTOPAR_EXACT_KERNELS"] = "1"  # a copy ends a group of calls, which rounds there
    torch.use_deterministic_algorithms(True)
    make, cases = (_llama, CASES) if device == "cuda" else (zoo.mlp, (CASES[0], CASES[-1]))
    plain: dict[str, Any] = {}
    print("| offload | losses, gradients | weights | peak, MiB | estimated | without | ms a step | without |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    wrong = []
    for said, options in cases:
        rest = {key: value for key, value in options.items() if key not in ("offload", "horizon")}
        if str(rest) not in plain:
            plain[str(rest)] = _trained(make, device, rest)
        want, got = plain[str(rest)], _trained(make, device, options)
        same = all(map(torch.equal, want.losses + want.gradients, got.losses + got.gradients))
        pairs = zip(got.weights, want.weights, strict=True)
        apart = max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)
        allowed = CLOSE if "parameters" in str(options["offload"]) else 0.0
        cells = (
            f"{'equal' if same else 'DIFFER'} | {apart:.0e} | {got.peak:.1f} | {got.estimated:.1f} | {want.peak:.1f}"
        )
        print(f"| {said} | {cells} | {got.ms:.1f} | {want.ms:.1f} |", flush=True)
        wrong += [said] * (not same or apart > allowed)
    torch.use_deterministic_algorithms(False)
    del os.environ["AUTOPAR_EXACT_KERNELS"]
    print()
    _beside_torch(device)
    assert not wrong, f"not the same step: {', '.join(wrong)}"


class _Run:
    """A training run, and what it took. estimated, peak: MiB of the device in a step."""

    losses: Losses
    gradients: list[Tensor]
    weights: list[Tensor]
    peak: float
    estimated: float
    ms: float


def _trained(make: Callable[[], Made], device: str, options: dict[str, Any]) -> _Run:
    run, (made, loss_fn, batch) = _Run(), make()
    batch = tuple(leaf.to(device) for leaf in batch)
    model = autopar.parallelize(made, "dp=1", loss_fn=loss_fn, device=device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.losses, times = [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        run.losses.append(model.forward_backward(*batch).detach().cpu())
        if i == 0:
            run.gradients = [p.grad.full_tensor().cpu().clone() for p in model.parameters()]  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # reads them where they lie
        optimizer.step()
        times.append(_ms(partial(model.forward_backward, *batch), device) if i > 1 else 0.0)
    run.weights = [value.clone() for value in model.full_state_dict().values()]
    optimizer.zero_grad()
    run.peak = measure(model, optimizer, *batch).step / 2**20
    run.estimated = model.prepare(*batch).memory().step / 2**20
    run.ms = min(times[2:])
    del model, optimizer
    gc.collect()
    return run


def _ms(step: Callable[[], Any], device: str) -> float:
    """Milliseconds of a step that is over when it has returned and the device is done."""
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def _beside_torch(device: str) -> None:
    """Time and memory of steps in bf16, beside torch's `save_on_cpu`."""
    sides = {"autopar": ours(), **{f"autopar, {said}": ours(**options) for said, options in TIMED.items()}}
    saved = partial(torch.autograd.graph.save_on_cpu, pin_memory=device == "cuda")
    sides["eager"], sides["eager, save_on_cpu"] = plain(), plain(inside=saved)
    table(device, sides, dict(list(timed(device).items())[:1]))


def _link(device: str) -> str:
    """Bytes a second between the device and pinned memory, each way."""
    if device != "cuda":
        return "no link"
    there, here = torch.empty(2**30, dtype=torch.uint8, pin_memory=True), torch.empty(2**30, dtype=torch.uint8).cuda()
    said = []
    for way, to, source in (("out", there, here), ("back", here, there)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        to.copy_(source, non_blocking=True)
        start.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        said.append(f"{way} {2**30 / start.elapsed_time(end) / 1e6:.1f} GB/s")
    return f"the link to pinned memory: {', '.join(said)}"


def _llama() -> Made:
    """Large enough that copies take longer than a launch: 0.4 billion parameters, 4,096 tokens."""
    torch.manual_seed(0)
    model = Llama(12, 1536, 12, 12, 4096, 8192, 1024)
    ids = torch.randint(8192, (4, 1024))
    return model, zoo.token_loss, (ids, ids)
