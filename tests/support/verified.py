"""As `autopar.verify` in float64, on several meshes with one capture for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.capture import LossFn
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, capture_step, lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepKeywords
from autopar.ir.plan import Fixed
from autopar.torch_compat import tree_map
from autopar.verification.plain import OptimizerFactory
from autopar.verification.verify import Report, cast, verify_compiled


@dataclass(frozen=True)
class Once:
    """A model that is captured once, whatever it is compiled for. options: those that its capture read."""

    model: nn.Module
    captured: Captured
    loss_fn: LossFn | None
    batch: Any
    options: StepKeywords

    @classmethod
    def of(
        cls, model: nn.Module, loss_fn: LossFn | None, batch: Any, dtype: torch.dtype | None = torch.float64,
        **options: Unpack[StepKeywords],
    ) -> Once:  # fmt: skip
        """The model goes to the dtype, or stays as it is. options: those that a capture reads."""
        if dtype is not None:
            model, batch = model.to(dtype), tree_map(lambda leaf: cast(leaf, dtype), batch)
        captured = capture_step(model, loss_fn, *batch_arguments(batch), options_of(**options), lift=dtype)
        return cls(model, captured, loss_fn, batch, options)

    def compiled(self, mesh: str, fixed: Fixed | None = None, **options: Unpack[StepKeywords]) -> Compiled:
        every: StepKeywords = {**self.options, **options}
        return Compiled.of(lower(self.captured, mesh_of(mesh), options_of(**every), fixed))

    def report(
        self, compiled: Compiled, steps: int = 2, optimizer: OptimizerFactory | None = None, seed: int = 0
    ) -> Report:
        return verify_compiled(
            self.model, self.captured, compiled, loss_fn=self.loss_fn, batch=self.batch, steps=steps,
            optimizer=optimizer, seed=seed,
        )  # fmt: skip

    def right(
        self, mesh: str, *, steps: int = 2, optimizer: OptimizerFactory | None = None, seed: int = 0,
        fixed: Fixed | None = None, **options: Unpack[StepKeywords],
    ) -> tuple[Report, Compiled]:  # fmt: skip
        """The report, which must be right, and what was compiled."""
        compiled = self.compiled(mesh, fixed, **options)
        report = self.report(compiled, steps, optimizer, seed)
        assert report.ok and report.max_error < 1e-10, f"\n{report}"
        return report, compiled


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
    once = Once.of(model, loss_fn, batch)
    return [once.right(mesh, steps=steps, optimizer=optimizer, seed=seed, fixed=fixed, **options) for mesh in meshes]
