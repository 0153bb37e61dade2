"""As `autopar.verify` in float64, on several meshes with one capture for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.capture import LossFn
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepKeywords
from autopar.ir.plan import Fixed
from autopar.torch_compat import tree_map
from autopar.verification.plain import OptimizerFactory
from autopar.verification.verify import Report, cast, verify_compiled


def verified(
    model: nn.Module,
    meshes: Iterable[str],
    loss_fn: LossFn | None,
    batch: Any,
    *,
    steps: int = 2,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
    fixed: Fixed | None = None,
    **options: Unpack[StepKeywords],
) -> list[tuple[Report, Compiled]]:
    """The report of each mesh, which must be right, and what was compiled for it. The model becomes float64."""
    model, batch = model.double(), tree_map(lambda leaf: cast(leaf, torch.float64), batch)
    captured = capture(model, loss_fn, *batch_arguments(batch), lift=torch.float64)
    found = []
    for mesh in meshes:
        compiled = lower(captured, mesh_of(mesh), options_of(**options), fixed)
        report = verify_compiled(
            model, captured, compiled, loss_fn=loss_fn, batch=batch, steps=steps, optimizer=optimizer, seed=seed
        )
        assert report.ok and report.max_error < 1e-10, f"\n{report}"
        found.append((report, compiled))
    return found
