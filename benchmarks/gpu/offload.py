"""Values that wait in the host's memory: bits, time and memory beside the same step without, and beside torch's own."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.ops.measure import human
from benchmarks.gpu.steps import cases, optimizer_of, ours, plain, table, token_loss

OPTIONS: dict[str, dict[str, Any]] = {
    "activations": {"offload": "activations"},
    "activations, horizon 1": {"offload": "activations", "horizon": 1},
    "recompute": {"recompute": "full"},
    "recompute, activations": {"recompute": "full", "offload": "activations"},
    "optimizer": {"offload": "optimizer"},
    "all": {"recompute": "full", "offload": ["activations", "optimizer"]},
}
STEPS = 4


def offload(device: str) -> None:
    """Losses and weights of some steps with each option beside those without offload, to the bit; then time and
    memory."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the same sums in each run, as torch wants it
    os.environ["AUTOPAR_EXACT_KERNELS"] = "1"  # a copy ends a group of calls, which rounds there
    torch.use_deterministic_algorithms(True)
    print(f"{_link(device)}\n\n| options | losses | weights | of the host |\n|---|---|---|---|")
    name, (make, rows, positions, vocabulary) = next(iter(cases(device).items()))
    torch.manual_seed(0)
    batch = tuple(torch.randint(vocabulary, (rows, positions), device=device) for _ in range(2))
    wrong: list[str] = []
    for kept in ({}, {"recompute": "full"}):
        alone = _trained(make, batch, device, kept)
        for said, options in {"again, without": kept, **OPTIONS}.items():
            if kept == {key: value for key, value in options.items() if key == "recompute"}:
                losses, weights, host = _trained(make, batch, device, options)
                apart = max(float((a - b).abs().max()) for a, b in zip(weights, alone[1], strict=True))
                cells = ["the same" if losses == alone[0] else f"{losses}", f"{apart:.1e}" if apart else "the same"]
                print(f"| {said} | {' | '.join(cells)} | {human(host)} |", flush=True)
                wrong += [said] * (losses != alone[0] or apart > 0)
    torch.use_deterministic_algorithms(False)
    del os.environ["AUTOPAR_EXACT_KERNELS"]
    print()
    sides = {"autopar": ours(), **{f"autopar, {said}": ours(**options) for said, options in OPTIONS.items()}}
    saved = partial(torch.autograd.graph.save_on_cpu, pin_memory=device == "cuda")
    sides["eager"], sides["eager, save_on_cpu"] = plain(), plain(inside=saved)
    table(device, sides, {name: cases(device)[name]})
    assert not wrong, f"not to the bit: {wrong}"


def _trained(
    make: Any, batch: tuple[Tensor, ...], device: str, options: dict[str, Any]
) -> tuple[list[float], list[Tensor], int]:
    """Losses, weights, and the bytes of the host that were told."""
    torch.manual_seed(1)
    with torch.device(device):
        made: nn.Module = make()
    model = autopar.parallelize(made, "dp=1", loss_fn=token_loss, device=device, precision="bf16", **options)
    optimizer, losses = optimizer_of(model, device), []
    for _ in range(STEPS):
        losses.append(model.forward_backward(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses, weights, model.prepare(*batch).memory(0, torch.optim.AdamW).host


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
