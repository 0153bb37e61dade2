"""Mixtures of experts: the programs of all ranks beside one device, and whole steps beside eager.

torch.compile takes no such step of torch 2.11: its `grouped_mm` under autocast has operands of two dtypes there.
"""

from __future__ import annotations

from typing import Any

import autopar
from benchmarks.gpu.models import GPTConfig, Kind, MixtureGPT, mixture_case, mixture_loss
from benchmarks.gpu.steps import Cases, ours, plain, table

MESHES: tuple[tuple[str, Kind, dict[str, Any]], ...] = (
    ("ep=2", Kind(bias=True, aux=True), {}),
    ("dp=2,ep=2", Kind(way="loop", skew=4.0), {}),
    ("ep=2,tp=2", Kind(shared=True), {"precision": "bf16"}),
    ("pp=2,ep=2", Kind(z=True), {"microbatches": 2}),
    ("ep=4", Kind(), {"expert_rows": 4.0}),
)


def experts(device: str) -> None:
    """`verify` on meshes with `ep`, then steps of a mixture of eight experts, two for each token."""
    wrong = []
    for mesh, kind, options in MESHES[: len(MESHES) if device == "cuda" else 2]:
        model, batch = mixture_case(kind)
        batch = tuple(leaf.to(device) for leaf in batch)
        made, loss_fn = model.to(device), lambda model, *batch: model(*batch)
        said = f"{mesh} {' '.join(f'{key}={value}' for key, value in options.items())}"
        report = autopar.verify(made, mesh, loss_fn=loss_fn, batch=batch, **options)
        print(f"- {said}: max error {report.max_error:.1e}", flush=True)
        wrong += [said] * (not report.ok)
    print()
    table(device, _sides(device), _cases(device))
    assert not wrong, f"not equal: {wrong}"


def _cases(device: str) -> Cases:
    if device == "cpu":
        return {"mixture": (lambda: MixtureGPT(GPTConfig(32, 16, 2, 2, 16)), 2, 16, 32)}
    return {"mixture": (lambda: MixtureGPT(GPTConfig(32000, 2048, 2, 16, 2048)), 8, 2048, 32000)}


def _sides(device: str) -> dict[str, Any]:
    sides = {"eager": plain(loss_fn=mixture_loss), "autopar": ours(mixture_loss)}
    if device == "cuda":
        sides["autopar, cuda graphs"] = ours(mixture_loss, cuda_graphs=True)
    return sides
