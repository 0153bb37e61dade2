"""Some steps of training, plainly and with the programs of all ranks, from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import nn

from autopar.capture import Captured, tables
from autopar.capture.capture import LossFn
from autopar.compiler.lowered import Lowered
from autopar.parallel.compilers import kernels_of
from autopar.parallel.own_batch import seed_of
from autopar.verification.comparison import Mismatch, Row, Values
from autopar.verification.copies import copied
from autopar.verification.locate import locate
from autopar.verification.noise import Trained, judged, move_away
from autopar.verification.places import Batches, Made
from autopar.verification.plain import OptimizerFactory
from autopar.verification.reference import Reference
from autopar.verification.sums import wrong_sums
from autopar.verification.virtual import Virtual


@dataclass(frozen=True, slots=True)
class Trial:
    """What both sides are given. The model is copied by each run, and not changed. others: the programs of the places
    behind the first one, where each place has a batch of its own."""

    model: nn.Module
    captured: Captured
    compiled: Lowered
    loss_fn: LossFn | None
    batches: Batches
    steps: int
    make: OptimizerFactory
    seed: int
    _: KW_ONLY
    others: tuple[Made, ...] = ()

    def compare(self) -> tuple[Reference, list[Values]]:
        """Train both sides; the reference holds the table, and beside it is what the plain module gave."""
        options, partners = self.compiled.plan.options, self.captured.partners
        plain = Reference(self.model, self.loss_fn, self.make, options, partners, len(self.batches))
        virtual = self._virtual()
        steps = []
        for drawn in self._seeds():
            expected, given = plain.step(self.batches, drawn), virtual.step_on(self.batches, drawn)
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

    def locate(self, tolerance: float) -> Mismatch:
        """The first node of the first step that differs, in the program of a place after the other."""
        first, seed = self._virtual(), self._seeds()[0]
        for place, ((captured, compiled), batch) in enumerate(zip(first.programs, self.batches, strict=True)):
            whole = first.whole(*batch, seed_of(seed, place))
            found = locate(captured.program, compiled, whole, tolerance, first.dtype, first.device)
            if found.node:
                return found
        return replace(found, text=found.text + ", or the means over all places are wrong") if place else found

    def _elsewhere(self) -> Trained | None:
        """What both sides give away from here; None if the model takes no other numbers: with specialize=True it is
        another program there, and a model may check what it is given."""
        for is_batch_fixed in (False, True):
            model = copied(self.model)
            away = replace(self, model=model, batches=move_away(model, self.batches, is_batch_fixed))
            with suppress(Exception):
                return away._trained(*away.compare())
        return None

    def _trained(self, reference: Reference, steps: Sequence[Values]) -> Trained:
        return reference.trained(self.model, self.batches, self._seeds(), steps)

    def _virtual(self) -> Virtual:
        kernels = kernels_of(self.compiled.plan.options.compile, next(tables.parameters(self.model)).device)
        return Virtual(copied(self.model), self.captured, self.compiled, self.make, kernels, self.others)

    def _seeds(self) -> list[torch.Tensor]:
        device = next(tables.parameters(self.model)).device
        return [torch.tensor([self.seed, step], device=device) for step in range(self.steps)]
