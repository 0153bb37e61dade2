"""Loss, every gradient and every updated weight beside plain PyTorch on the same device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.gpu.models import zoo

MODELS = ("mlp", "gpt", "llama", "few_kv_heads", "nanogpt", "transformer_encoder", "resnet", "conv", "vit")
CLOSE = 1e-3  # in float32: the largest difference of any tensor, relative to its norm
SHORT = 1.5  # times what autocast is away from float32: two bf16 products round differently
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("recompute=full", {"recompute": "full"}),
    ("microbatches=2", {"microbatches": 2}),
    ("op by op", {"compile": "executor"}),
    ("inductor", {"compile": "inductor"}),
)


def parity(device: str) -> None:
    """Every model in fp32 and bf16, and one with each option."""
    cases = [(name, precision, "", {}) for name in MODELS for precision in ("fp32", "bf16")]
    cases += [("gpt", "fp32", said, options) for said, options in OPTIONS]
    if device == "cpu":
        cases = [case for case in cases if case[0] in ("mlp", "gpt") and case[2] != "inductor"]
    print("Differences from float32; of bf16 beside those of autocast.\n")
    print("| model | precision | option | loss | gradients | weights |\n|---|---|---|---|---|---|")
    wrong = []
    for name, precision, said, options in cases:
        ours, theirs = _differences(name, precision, device, options)
        cells = [f"{a:.1e}" + (f" / {b:.1e}" if theirs else "") for a, b in zip(ours, theirs or ours, strict=True)]
        print(f"| {name} | {precision} | {said} | {' | '.join(cells)} |", flush=True)
        if max(ours) > (SHORT * max(theirs) if theirs else CLOSE):
            wrong.append(f"{name} {precision} {said}")
    assert not wrong, f"not as on one device: {', '.join(wrong)}"


def meshes(device: str) -> None:
    """`verify`, which runs the programs of all ranks of a mesh in one process, with its tensors on this device."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dp=2,tp=2", {}),
        ("dp=2,tp=2", {"precision": "bf16"}),
        ("pp=2,dp=2", {"microbatches": 3}),
    ]
    if device == "cuda":
        cases += [
            ("dp=3", {"zero": 3}),
            ("cp=2,tp=2", {"precision": "bf16"}),
            ("tp=4", {"sequence_parallel": True, "precision": "bf16"}),
        ]
    wrong = []
    for mesh, options in cases:
        made, loss_fn, batch = zoo.gpt()
        batch = tuple(leaf.to(device) for leaf in batch)
        report = autopar.verify(made.to(device), mesh, loss_fn=loss_fn, batch=batch, **options)
        said = " ".join(f"{key}={value}" for key, value in options.items())
        print(f"- {mesh} {said}: max error {report.max_error:.1e}", flush=True)
        wrong += [f"{mesh} {said}"] * (not report.ok)
    assert not wrong, f"not equal: {wrong}"


Differences = tuple[float, float, float]  # the largest of the loss, of gradients and of updated weights


def _differences(
    name: str, precision: str, device: str, options: dict[str, Any]
) -> tuple[Differences, Differences | None]:
    """Relative differences from the plain model in float32, after a step of SGD: ours, and autocast's in bf16."""
    made, loss_fn, batch = getattr(zoo, name)()
    made, batch = made.to(device).train(), tuple(leaf.to(device) for leaf in batch)
    exact, short = _trained(copy.deepcopy(made), loss_fn, batch, contextlib.nullcontext()), precision != "fp32"
    theirs = _trained(copy.deepcopy(made), loss_fn, batch, torch.autocast(device, torch.bfloat16)) if short else None
    asked = {"precision": precision} if short else {}
    model = autopar.parallelize(made, "dp=1", loss_fn=loss_fn, device=device, **asked, **options)
    loss, gradients = model.forward_backward(*batch), _whole(model, "grad")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    ours = _apart(([loss], gradients, _whole(model, "data")), exact)
    return ours, theirs and _apart(theirs, exact)


Step = tuple[list[Tensor], list[Tensor], list[Tensor]]  # the loss, gradients and weights


def _trained(model: nn.Module, loss_fn: Any, batch: Any, context: Any) -> Step:
    """A step of the plain model."""
    with context:
        loss = loss_fn(model, *batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [loss.detach()], gradients, [p.detach() for p in model.parameters()]


def _apart(side: Step, other: Step) -> Differences:
    loss, gradients, weights = (_worst(a, b) for a, b in zip(side, other, strict=True))
    return loss, gradients, weights


def _whole(model: nn.Module, what: str) -> list[Tensor]:
    """The whole values of what a rank has of its parameters."""
    values = [p.grad if what == "grad" else p.detach() for p in model.parameters()]
    return [value.full_tensor() for value in values]  # type: ignore[union-attr]


def _worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the norm of what it is beside, or to a thousandth of the largest norm where
    a gradient is rounding noise."""
    least = max(float(b.float().norm()) for b in theirs) * 1e-3
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.detach() - b).float().norm()) / max(float(b.norm()), least) for a, b in pairs)


def scaling(device: str) -> None:
    """fp16: losses of some steps beside autocast with a GradScaler; no step may lose a number."""
    steps = 20 if device == "cuda" else 2
    made, loss_fn, batch = zoo.gpt()
    made, batch = made.to(device), tuple(leaf.to(device) for leaf in batch)
    other = copy.deepcopy(made)
    model = autopar.parallelize(made, "dp=1", loss_fn=loss_fn, device=device, precision="fp16")
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.1) for side in (model, other)]
    scaler = torch.amp.GradScaler(device)
    worst = 0.0
    for _ in range(steps):
        ours = model.forward_backward(*batch).item()
        optimizers[0].step()
        with torch.autocast(device, torch.float16):
            loss = loss_fn(other, *batch)
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        worst = max(worst, abs(ours - loss.item()) / abs(loss.item()))
    print(f"{steps} steps: loss {ours:.5f}, with GradScaler {loss.item():.5f}; largest relative difference {worst:.1e}")
    assert worst < 2e-2, "the losses part"
