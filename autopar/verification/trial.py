"""Some steps of training, plainly and with the programs of all ranks, from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import nn

from autopar.capture import Captured, LossFn
from autopar.capture.inputs import tables
from autopar.compiler.lowered import Lowered
from autopar.errors import first_sentence
from autopar.parallel.session.compilers import kernels_of
from autopar.verification.copies import copied
from autopar.verification.judge.comparison import Exact, Mismatch, Report, Values
from autopar.verification.judge.noise import Trained, judged, move_away
from autopar.verification.judge.sum_dtypes import wrong_sums
from autopar.verification.lifted import Single, all_lifted, lifted
from autopar.verification.locate import locate
from autopar.verification.places import Batches, Made, seeds_of
from autopar.verification.plain import OptimizerFactory
from autopar.verification.reference import Reference
from autopar.verification.versions import Versions
from autopar.verification.virtual_side import Virtual


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
    is_lifted: bool = False  # to float64: beside the captured programs, see `lifted.py`
    versions: Versions | None = None  # of the programs, if draws or data decide which one runs
    is_stepwise: bool = False  # each step begins with what the plain module gave in the one before

    def lifted(self) -> Trial:
        """The same programs in float64, beside the captured ones."""
        programs = [(self.captured, self.compiled), *self.others]
        model, (first, *others), batches = all_lifted(self.model, programs, self.batches)
        return Trial(
            model, *first, self.loss_fn, batches, self.steps, self.make, self.seed,
            others=tuple(others), is_lifted=True, versions=self._versions.mapped(lambda made: list(map(lifted, made))),
        )  # fmt: skip

    def report(self) -> Report:
        """Compare both sides, and judge what differs. Programs of a shorter float run in float64 as well: what is wrong
        by less than its resolution shows there alone."""
        reference, steps = self.compare()
        rows, table = reference.table.rows(), reference.table
        told = f"{self.compiled.mesh}{', as DistributedDataParallel' * bool(self.others)}"
        changed = Report(told, reference.dtype, self.steps, table.tolerance, rows, None, reference.note, self._sums())
        if not changed.is_longest:
            changed = replace(changed, exact=self._exact())
        if changed.exact is not None and changed.exact.is_wrong:  # no noise excuses that
            return replace(changed, mismatch=changed.exact.mismatch)
        if not all(row.ok for row in rows):
            trained = self._trained(reference, steps)
            if changed.exact is not None and not changed.exact.failed:
                trained = replace(trained, limits=trained.limits.after_float64())
            changed = replace(changed, rows=judged(rows, trained, self._elsewhere))
        if all(row.ok for row in changed.rows):
            return changed
        if changed.is_undecided and self.steps > 1 and not self.is_stepwise:
            return replace(replace(self, is_stepwise=True).report(), is_stepwise=True)
        if not changed.is_undecided:
            return replace(changed, mismatch=self.locate(table.of_nodes))
        mismatch = self.locate(reference.limits.clear)  # nodes have the noise that the rows have
        return replace(changed, mismatch=mismatch if mismatch.node else None)

    def _exact(self) -> Exact:
        try:
            found = self.lifted().report()
        except Exception as error:
            return Exact(failed=f"{type(error).__name__}: {first_sentence(str(error))}")
        return Exact(found.rows, mismatch=found.mismatch)

    def compare(self) -> tuple[Reference | Single, list[Values]]:
        """Train both sides; the reference holds the table, and beside it is what the plain module gave."""
        virtual = self._virtual()
        plain = self._other_side(virtual)
        steps = []
        for drawn in self._seeds():
            given, expected = virtual.step_on(self.batches, drawn), plain.step(self.batches, drawn)
            plain.compare(expected, given, virtual.replicas)
            steps.append(expected)
            if self.is_stepwise:
                virtual.begin(expected)
        return plain, steps

    def _sums(self) -> tuple[str, ...]:
        """A line for each sum of gradients in another dtype than was asked for."""
        return () if self.is_lifted else wrong_sums(self.compiled)

    def locate(self, tolerance: float) -> Mismatch:
        """The first node of the first step that differs, in the program of a place after the other."""
        first = self._virtual()
        seeds = seeds_of(self._seeds()[0], len(self.batches))
        for (captured, compiled), batch, seed in zip(first.programs, self.batches, seeds, strict=True):
            whole = first.whole(*batch, seed)
            meant = (None if self.is_lifted else compiled.grouped) or captured.program
            mismatch = locate(meant, compiled, whole, tolerance, first.dtype, first.device)
            if mismatch.node:
                return mismatch
        return (
            replace(mismatch, text=mismatch.text + ", or the means over all places are wrong")
            if self.others
            else mismatch
        )

    def _elsewhere(self) -> Trained | None:
        """What both sides give away from here; None if the model takes no other numbers: with specialize=True it is
        another program there, and a model may check what it is given."""
        for is_batch_fixed in (False, True):
            model = copied(self.model)
            away = replace(self, model=model, batches=move_away(model, self.batches, is_batch_fixed))
            with suppress(Exception):
                return away._trained(*away.compare())
        return None

    def _trained(self, reference: Reference | Single, steps: Sequence[Values]) -> Trained:
        return reference.trained(self.model, self.batches, self._seeds(), steps, self.is_stepwise)

    def _other_side(self, virtual: Virtual) -> Reference | Single:
        if self.is_lifted:
            return Single(self.model, self._versions, self.make)
        options, partners = self.compiled.plan.options, self.captured.partners
        return Reference(
            self.model, self.loss_fn, self.make, options, partners, len(self.batches), self.compiled,
            virtual.draws_of,
        )  # fmt: skip

    @property
    def _versions(self) -> Versions:
        return self.versions or Versions([[(self.captured, self.compiled), *self.others]])

    def _virtual(self) -> Virtual:
        if self.is_lifted:
            return Virtual(
                copied(self.model), self.captured, self.compiled, self.make, None, self.others, self.versions
            )
        kernels = kernels_of(self.compiled.plan.options.compile, next(tables.parameters(self.model)).device)
        return Virtual(copied(self.model), self.captured, self.compiled, self.make, kernels, self.others, self.versions)

    def _seeds(self) -> list[torch.Tensor]:
        device = next(tables.parameters(self.model)).device
        return [torch.tensor([self.seed, step], device=device) for step in range(self.steps)]
