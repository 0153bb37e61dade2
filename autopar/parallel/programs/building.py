"""Build the program of a call on this rank alone: captured, bound to what is decided, taken through the passes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from autopar.capture import Captured, Earlier
from autopar.capture.python.guards import Guards
from autopar.capture.python.scalars import Scalars
from autopar.capture.python.spots import Numbers
from autopar.compiler.compile import capture_step, lower
from autopar.compiler.lowered import Lowered
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Decided, Fixed
from autopar.parallel.programs.meetings import BatchRows, FollowedSamples, naming_parts
from autopar.parallel.programs.numbers import ChangingNumbers
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.variants import Constants
from autopar.parallel.session.session import Session
from autopar.parallel.weights.owners import Owners, as_trained, check_partners


@dataclass(frozen=True, slots=True)
class Built:
    """A program with what it was captured from, and what that read in Python. rows: of a batch of which ranks have
    parts."""

    captured: Captured
    compiled: Lowered
    guards: Guards
    constants: Constants
    rows: BatchRows | None


class ProgramBuilder:
    """Builds the programs of one parallel module; moves no data between ranks."""

    def __init__(self, session: Session, numbers: ChangingNumbers) -> None:
        self._settings, self._store, self._numbers = session.settings, session.store, numbers
        self._followed = FollowedSamples(session.store.model)
        self._decided: dict[Hashable, Decided] = {}  # layouts of the first program of each structure
        self._earlier = {True: Earlier(), False: Earlier()}  # captures of training steps, and of others
        self._sequence: dict[bool, bool] = {}  # of training steps, and of others: what "auto" was decided to mean

    def build(self, given: Given, numbers: Numbers, train: bool, is_first: bool) -> Built:
        """The program for a call with these arguments.

        numbers: those among the arguments. is_first: of the model's programs, so that it decides the layouts.
        """
        is_able = not self._settings.options.specialize
        return self._numbers.build(lambda scalars: self._built(given, numbers, train, is_first, scalars), is_able)

    def _built(self, given: Given, numbers: Numbers, train: bool, is_first: bool, scalars: Scalars) -> Built:
        settings, model, mesh = self._settings, self._store.model, self._store.distributor.mesh
        with scalars, naming_parts(given):
            args, kwargs = given.arguments(numbers)
            captured = capture_step(
                model, settings.loss_fn, args, kwargs, replace(settings.options, batch_dims=None),
                train=train, lift=settings.lift, earlier=self._earlier[train],
            )  # fmt: skip
        captured = captured.with_dims(given.dims)
        guards = Guards(model, settings.loss_fn if train else None, captured.ran, scalars, numbers)
        scalars.check(captured.constants, guards.places, captured.result_leaves)
        check_partners(captured, model, mesh, settings.options)
        owners = Owners.of(self._store, captured.partners)
        options, fixed = self._bound(is_first, train)
        if given.portion is not None and not given.portion.is_even:
            fixed = replace(fixed, uneven=True)
        fixed = replace(fixed, is_own=given.portion is not None and given.portion.is_own)
        with naming_parts(given):
            compiled = lower(as_trained(captured), mesh, *owners.bind(options, fixed))
        rows = self._followed.rows(compiled, given, train)
        structure, decided = compiled.decided
        self._decided.setdefault(structure, decided)
        if compiled.sequence is not None:
            self._sequence.setdefault(train, compiled.sequence)
        return Built(captured, compiled, guards, Constants.of(captured, guards, scalars, settings.device), rows)

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
