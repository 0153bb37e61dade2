"""Build the program of a call on this rank alone: captured, bound to what is decided, taken through the passes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from autopar.capture import Captured, Earlier
from autopar.capture.containers import Parts
from autopar.capture.guards import Guards
from autopar.capture.scalars import Scalars
from autopar.capture.spots import Numbers
from autopar.compiler.compile import capture_step, lower
from autopar.compiler.constraints import batch_ranks
from autopar.compiler.lowered import Lowered
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Decided, Fixed
from autopar.parallel.batches import at_global_size, check_split, with_numbers
from autopar.parallel.numbers import ChangingNumbers
from autopar.parallel.partners import Owners, as_trained, check_partners
from autopar.parallel.session import Session
from autopar.parallel.variants import Constants


@dataclass(frozen=True, slots=True)
class Built:
    """A program with what it was captured from, and what that read in Python."""

    captured: Captured
    compiled: Lowered
    guards: Guards
    constants: Constants


class Builder:
    """Builds the programs of one parallel module; moves no data between ranks."""

    def __init__(self, session: Session, numbers: ChangingNumbers) -> None:
        self._settings, self._store, self._numbers = session.settings, session.store, numbers
        self._decided: dict[Hashable, Decided] = {}  # layouts of the first program of each structure
        self._earlier = {True: Earlier(), False: Earlier()}  # captures of training steps, and of others
        self._sequence: dict[bool, bool] = {}  # of training steps, and of others: what "auto" was decided to mean

    def build(self, parts: Parts, given: Numbers, train: bool, is_first: bool) -> Built:
        """The program for a call with these arguments.

        given: the numbers among the arguments. is_first: of the model's programs, so that it decides the layouts.
        """
        is_able = not self._settings.options.specialize
        return self._numbers.build(lambda scalars: self._built(parts, given, train, is_first, scalars), is_able)

    def _built(self, parts: Parts, given: Numbers, train: bool, is_first: bool, scalars: Scalars) -> Built:
        settings, model, mesh = self._settings, self._store.model, self._store.distributor.mesh
        ranks = batch_ranks(mesh) if settings.is_local else 1
        with scalars:
            args, kwargs = at_global_size(with_numbers(parts, given), ranks)
            captured = capture_step(
                model, settings.loss_fn, args, kwargs, settings.options,
                train=train, lift=settings.lift, earlier=self._earlier[train],
            )  # fmt: skip
        guards = Guards(model, settings.loss_fn if train else None, captured.ran, scalars, given)
        scalars.check(captured.constants, guards.places, captured.result_leaves)
        check_partners(captured, model, mesh, settings.options)
        owners = Owners.of(self._store, captured.partners)
        compiled = lower(as_trained(captured), mesh, *owners.bind(*self._bound(is_first, train)))
        if settings.is_local:
            check_split(compiled, parts)
        structure, decided = compiled.decided
        self._decided.setdefault(structure, decided)
        if compiled.sequence is not None:
            self._sequence.setdefault(train, compiled.sequence)
        return Built(captured, compiled, guards, Constants.of(captured, guards, scalars, settings.device))

    def _bound(self, is_first: bool, train: bool) -> tuple[StepOptions, Fixed]:
        """The options of a program, and what is decided: the layouts and stages of the first one bind the others."""
        options, fixed = self._settings.options, self._settings.fixed
        if is_first:
            return options, fixed
        sequence: SequenceParallel = "auto" if options.sequence_parallel else False
        # What divided the first batch need not divide the last of an epoch, nor every sequence.
        bound = replace(options, shard=None, sequence_parallel=sequence)
        wanted = True if options.sequence_parallel is True else self._sequence.get(train)
        return bound, replace(
            fixed, owners=self._store.stages, uneven=True, decided=dict(self._decided), sequence=wanted
        )
