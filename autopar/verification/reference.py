"""The other side of `verify`: what a step should give, and how far from it a step may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autopar.capture.inputs.containers import map_batch
from autopar.capture.inputs.loss_outputs import LossFn
from autopar.capture.inputs.partners import Partner
from autopar.compiler.lowered import Lowered
from autopar.ir.options import StepOptions
from autopar.passes.groups import parts_of_batch
from autopar.verification.borrowed import Borrowed
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, dtype_of, module_in
from autopar.verification.judge.comparison import Table, Values
from autopar.verification.judge.noise import Limits, Trained
from autopar.verification.places import Batches
from autopar.verification.plain import DrawsOf, OptimizerFactory, Plain, PlainReplicas, as_they_come, steps_of
from autopar.verification.plain_norms import PlainNorms


class Reference:
    """What a step should give, and how far from it a step may be.

    The programs of a precision are compared with the plain module in float64: no tensor may be further from it than
    twice what torch.autocast is on one device, or than a rounding of the short float.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory, options: StepOptions,
        partners: tuple[Partner, ...] = (), places: int = 1, compiled: Lowered | None = None,
        draws: DrawsOf = as_they_come,
    ) -> None:  # fmt: skip
        self.short, self.low = short_of(options), options.low_dtype
        self.loss_fn, self.make, self.partners, self.places = loss_fn, make, partners, places
        self.compiled, self.draws = compiled, draws
        exact = copied(model)
        self.plain = self.anew(exact if self.short is None else module_in(exact, torch.float64), None)
        self.other = self.anew(copied(model), self.low) if self.low else None
        self.dtype = dtype_of(model)
        sums_are_short = options.reduce_dtype.itemsize < 4
        self.table = Table.of(self.dtype) if self.short is None else Table.of(self.short, 1 + sums_are_short)
        # Under a precision the noise is that of torch.autocast, beside float64: with its own error in it.
        self.limits = Limits.of(self.dtype) if self.short is None else Limits.of(self.short)

    def borrow(self, partners: tuple[Partner, ...], compiled: Lowered) -> None:
        """Give each side values of its own for the other models in the loss, and the groups of its norms."""
        self.partners, self.compiled = partners, compiled
        for side in filter(None, (self.plain, self.other)):
            for replica in side.all:
                replica.borrowed = Borrowed(partners, dtype_of(replica.model))
                replica.norms, replica.microbatches = self._norms(), self._microbatches()

    def anew(self, model: nn.Module, low: torch.dtype | None) -> PlainReplicas:
        """A module to train as this side does, under torch.autocast in a dtype if there is one."""
        return PlainReplicas(
            lambda one: Plain(
                one, self.loss_fn, self.make, low, self.partners, self._norms(), self.draws, self._microbatches()
            ),
            model, self.places,
        )  # fmt: skip

    def _norms(self) -> PlainNorms | None:
        return None if self.compiled is None else PlainNorms.of(self.compiled)

    def _microbatches(self) -> int:
        return 1 if self.compiled is None else parts_of_batch(self.compiled.plan)

    def trained(
        self, model: nn.Module, batches: Batches, seeds: Sequence[torch.Tensor], steps: Sequence[Values],
        is_stepwise: bool = False,
    ) -> Trained:  # fmt: skip
        """The table so far, with what measures how far rounding moves it. steps: what the plain module gave.
        is_stepwise: each step begins with what the one before gave there."""

        def again(change: Callable[[nn.Module], None], is_short: bool) -> list[Values]:
            changed = copied(model)
            change(changed)
            plain = self.anew(changed, self.low if is_short else None)
            return steps_of(plain, batches, seeds, steps if is_stepwise else ())

        return Trained(self.table, steps, again, self.limits, self.low)

    @property
    def note(self) -> str:
        """What the report says of the comparison."""
        if self.short is None:
            return ""
        told = ", or twice the error of torch.autocast" if self.other else ""
        return f"{str(self.short).removeprefix('torch.')} against float64{told}"

    def step(self, batches: Batches, seed: torch.Tensor) -> Values:
        """What the plain module gives."""
        self.allowed = {}
        if self.other is not None:
            try:
                self.allowed = self.other.step(batches, seed)
            except Exception:
                self.other = None
        if self.short is not None:
            batches = map_batch(lambda leaf: cast(leaf, torch.float64), batches)
        return self.plain.step(batches, seed)

    def compare(self, expected: Values, given: Values, replicas: Mapping[tuple[str, str], float]) -> None:
        """Enter a step in the table."""
        self.table.compare(expected, given, replicas, self.allowed)


def short_of(options: StepOptions) -> torch.dtype | None:
    """The shortest dtype that the programs of a plan compute or sum in; None if they compute as the model is."""
    if options.sums_dtype is None:
        return None
    return options.low_dtype or options.reduce_dtype
