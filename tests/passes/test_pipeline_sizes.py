"""A pipeline that meets batches of other sizes: the stages stay, and every size trains as one device does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.verification.verify import verify_compiled

DEPTH = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Embedding(10, 8), *layers, nn.Linear(8, 4)).double()


def loss_fn(model: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
    return (model(ids).mean(1) - y).square().mean()


def batch_of(size: int, length: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size)
    return torch.randint(0, 10, (size, length)), torch.randn(size, 4).double()


def bound(options: StepOptions, first: Compiled) -> tuple[StepOptions, Fixed]:
    """As `Programs` binds every program but the first."""
    known = {name: str(layout) for name, layout in first.searched.items()}
    owners = first.pipeline.owners if first.pipeline is not None else None
    return replace(options, shard=known), Fixed(owners=owners, uneven=True)


CASES: dict[str, tuple[str, dict[str, Any], int, tuple[int, ...]]] = {
    "1f1b": ("pp=2", {"microbatches": 4}, 12, (5, 24)),
    "three stages": ("pp=3", {}, 12, (13,)),
    "odd first": ("pp=2", {}, 7, (12,)),
    "zb-h1": ("pp=2", {"microbatches": 4, "schedule": "zb-h1"}, 12, (3,)),
    "zb-v": ("pp=2", {"microbatches": 4, "schedule": "zb-v"}, 12, (3,)),
    "dp": ("dp=2,pp=2", {"microbatches": 3}, 12, (1, 6, 7)),
    "dp, zb-v, zero": ("dp=2,pp=2", {"microbatches": 2, "schedule": "zb-v", "zero": 2}, 12, (3,)),
    "tp": ("pp=2,tp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "chunks": 2}, 12, (3,)),
    "accumulation": ("dp=2", {"microbatches": 3}, 12, (5,)),
    **{f"zero={stage}": ("dp=2", {"microbatches": 3, "zero": stage}, 12, (5,)) for stage in (1, 3)},
}


@pytest.mark.parametrize("name", CASES)
def test_every_size_trains_as_one_device(name: str) -> None:
    mesh, options, first_size, sizes = CASES[name]
    chosen, parsed = options_of(**options), mesh_of(mesh)
    first: Compiled | None = None
    for size in (first_size, *sizes):
        batch = batch_of(size, length=4 if size != 13 else 5)
        captured = capture(network(), loss_fn, batch, {})
        compiled = lower(captured, parsed, *((chosen,) if first is None else bound(chosen, first)))
        if first is None:
            first = compiled
        elif compiled.pipeline is not None and first.pipeline is not None:
            assert dict(compiled.pipeline.owners) == dict(first.pipeline.owners)
        report = verify_compiled(network(), captured, compiled, loss_fn=loss_fn, batch=batch, steps=1)
        assert report.ok, f"{size} samples: {report}"
        wanted = options.get("microbatches")
        if wanted and size >= 2 * wanted and size % (2 * wanted) == 0:
            assert compiled.plan.microbatches == wanted
        if wanted and size > 2:
            assert compiled.plan.microbatches > 1, f"{size} samples in one micro-batch"
