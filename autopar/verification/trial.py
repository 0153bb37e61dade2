"""Some steps of training, plainly and with the programs of all ranks, from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, tables
from autopar.capture.capture import LossFn
from autopar.compiler.lowered import Lowered
from autopar.parallel.compilers import kernels_of
from autopar.verification.comparison import Mismatch, Row, Values
from autopar.verification.copies import copied
from autopar.verification.locate import locate
from autopar.verification.noise import Trained, judged, move_away
from autopar.verification.reference import OptimizerFactory, Plain, Reference
from autopar.verification.sums import wrong_sums
from autopar.verification.virtual import Virtual


@dataclass(frozen=True, slots=True)
class Trial:
    """What both sides are given. The model is copied by each run, and not changed."""

    model: nn.Module
    captured: Captured
    compiled: Lowered
    loss_fn: LossFn | None
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]  # of the loss function, behind the model
    steps: int
    make: OptimizerFactory
    seed: int

    def compare(self) -> tuple[Reference, list[Values]]:
        """Train both sides; the reference holds the table, and beside it is what the plain module gave."""
        options, partners = self.compiled.plan.options, self.captured.partners
        plain = Reference(self.model, self.loss_fn, self.make, options, partners)
        virtual = self._virtual()
        steps = []
        for drawn in self._seeds():
            expected, given = plain.step(*self.arguments, drawn), virtual.step(*self.arguments, drawn)
            plain.compare(expected, given, virtual.replicas)
            steps.append(expected)
        return plain, steps

    def judged_by_noise(self, rows: Sequence[Row], reference: Reference, steps: Sequence[Values]) -> tuple[Row, ...]:
        """The rows, of which those are right that differ by rounding alone, here and elsewhere. reference, steps: what
        `compare` gave."""
        return judged(rows, self._trained(reference, steps), self._elsewhere)

    def wrong_sums(self) -> tuple[str, ...]:
        """A line for each sum of gradients in another dtype than was asked for."""
        return wrong_sums(self.compiled)

    def locate(self, tolerance: float) -> Mismatch | None:
        """The first node of the first step that differs."""
        first = self._virtual()
        whole = first.whole(*self.arguments, self._seeds()[0])
        return locate(self.captured.program, self.compiled, whole, tolerance, first.dtype, first.device)

    def _elsewhere(self) -> Trained | None:
        """What both sides give away from here; None if the model takes no other numbers: with specialize=True it is
        another program there, and a model may check what it is given."""
        for is_batch_fixed in (False, True):
            model = copied(self.model)
            away = replace(self, model=model, arguments=move_away(model, self.arguments, is_batch_fixed))
            with suppress(Exception):
                return away._trained(*away.compare())
        return None

    def _trained(self, reference: Reference, steps: Sequence[Values]) -> Trained:
        low = self.compiled.plan.options.low_dtype

        def again(change: Callable[[nn.Module], None], is_short: bool) -> list[Values]:
            model = copied(self.model)
            change(model)
            plain = Plain(model, self.loss_fn, self.make, low if is_short else None, self.captured.partners)
            return [plain.step(*self.arguments, drawn) for drawn in self._seeds()]

        return Trained(reference.table, steps, again, reference.limits, low)

    def _virtual(self) -> Virtual:
        kernels = kernels_of(self.compiled.plan.options.compile, next(tables.parameters(self.model)).device)
        return Virtual(copied(self.model), self.captured, self.compiled, self.make, kernels)

    def _seeds(self) -> list[torch.Tensor]:
        device = next(tables.parameters(self.model)).device
        return [torch.tensor([self.seed, step], device=device) for step in range(self.steps)]
