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
# By precision: the largest difference of any tensor, relative to its norm. Two bf16 products round differently.
CLOSE = {"fp32": 1e-3, "bf16": 5e-2}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("recompute=full", {"recompute": "full"}),
    ("microbatches=2", {"microbatches": 2}),
    ("inductor", {"compile": "inductor"}),
)


def parity(device: str) -> None:
    """Every model in fp32 and bf16, and one with each option."""
    cases = [(name, precision, "", {}) for name in MODELS for precision in ("fp32", "bf16")]
    cases += [("gpt", "fp32", said, options) for said, options in OPTIONS]
    if device == "cpu":
        cases = [case for case in cases if case[0] in ("mlp", "gpt") and "compile" not in case[3]]
    print("| model | precision | option | loss | gradients | weights |\n|---|---|---|---|---|---|")
    wrong = []
    for name, precision, said, options in cases:
        found = _differences(name, precision, device, options)
        print(f"| {name} | {precision} | {said} | {' | '.join(f'{one:.1e}' for one in found)} |", flush=True)
        if max(found) > CLOSE[precision]:
            wrong.append(f"{name} {precision} {said}")
    assert not wrong, f"not as on one device: {', '.join(wrong)}"


def _differences(name: str, precision: str, device: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """The largest relative differences of the loss, of gradients and of weights after a step of SGD."""
    made, loss_fn, batch = getattr(zoo, name)()
    made, batch = made.to(device).train(), tuple(leaf.to(device) for leaf in batch)
    other = copy.deepcopy(made)
    short = {} if precision == "fp32" else {"precision": precision}
    model = autopar.parallelize(made, "dp=1", loss_fn=loss_fn, device=device, **short, **options)
    ours = model.forward_backward(*batch)
    with torch.autocast(device, torch.bfloat16) if short else contextlib.nullcontext():
        theirs = loss_fn(other, *batch)
    theirs.backward()
    names = [name for name, _ in other.named_parameters()]
    gradients = _worst(_whole(model, "grad"), [p.grad for p in other.parameters()], names)
    for side in (model, other):
        torch.optim.SGD(side.parameters(), lr=0.1).step()
    return _worst([ours], [theirs], ["loss"]), gradients, _worst(_whole(model, "data"), list(other.parameters()), names)


def _whole(model: nn.Module, what: str) -> list[Tensor]:
    """The whole values of what a rank has of its parameters."""
    values = [p.grad if what == "grad" else p.detach() for p in model.parameters()]
    return [value.full_tensor() for value in values]  # type: ignore[union-attr]


def _worst(ours: list[Tensor], theirs: list[Any], names: list[str]) -> float:
    """The largest difference, relative to the norm of what it is beside, or to a thousandth of the largest norm where
    a gradient is rounding noise."""
    assert len(ours) == len(theirs) == len(names)
    least = max(float(b.detach().float().norm()) for b in theirs) * 1e-3
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.detach() - b.detach()).float().norm()) / max(float(b.detach().norm()), least) for a, b in pairs)


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
