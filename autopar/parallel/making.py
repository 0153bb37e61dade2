"""Make the program of a call on every rank: captured, taken through the passes, agreed on, ready to run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.capture import LossFn
from autopar.capture.containers import Parts
from autopar.capture.guards import Guards
from autopar.capture.scalars import Scalars
from autopar.capture.spots import Numbers
from autopar.compiler.compile import capture_step, lower
from autopar.compiler.constraints import batch_ranks
from autopar.compiler.lowered import Lowered
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.parallel.agreement import Agreement, Phase
from autopar.parallel.batches import at_global_size, check_split, with_numbers
from autopar.parallel.execution import Running, make_runner
from autopar.parallel.numbers import ChangingNumbers
from autopar.parallel.partners import Joined, Owners, as_trained, check_partners
from autopar.parallel.store import ParameterStore
from autopar.parallel.variants import Constants
from autopar.runtime.distributed import Group, make_groups

_log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What does not change from step to step. is_local: each rank is given its own part of the batch. lift: as of
    `capture`."""

    loss_fn: LossFn | None
    options: StepOptions
    fixed: Fixed
    is_local: bool
    device: torch.device
    compiler: str | None
    lift: torch.dtype | None


class Maker:
    """Makes the programs of one parallel module. What one rank cannot make is an error on all of them."""

    def __init__(
        self, settings: StepSettings, store: ParameterStore, agreement: Agreement, numbers: ChangingNumbers
    ) -> None:
        self._settings, self._store, self._agreement, self._numbers = settings, store, agreement, numbers
        self._joined = Joined(settings.device)
        self._groups: dict[str, Group] = {}
        self._said: set[str] = set()

    def make(self, parts: Parts, given: Numbers, train: bool, is_first: bool) -> tuple[Running, Guards]:
        """The program for a call with these arguments, and what it read in Python. Every rank must call this.

        given: the numbers among the arguments. is_first: of the model's programs, so that it decides the layouts.
        """
        settings, where = self._settings, self._store.distributor

        def make(scalars: Scalars) -> tuple[Captured, Lowered, Guards, Constants]:
            ranks = batch_ranks(where.mesh) if settings.is_local else 1
            with scalars:
                global_args, global_kwargs = at_global_size(with_numbers(parts, given), ranks)
                captured = capture_step(
                    self._store.model, settings.loss_fn, global_args, global_kwargs, settings.options,
                    train=train, lift=settings.lift,
                )  # fmt: skip
            guards = Guards(self._store.model, settings.loss_fn if train else None, captured.ran, scalars, given)
            scalars.check(captured.constants, guards.places, captured.result_leaves)
            check_partners(captured, self._store.model, where.mesh, settings.options)
            owners = Owners.of(self._store, captured.partners)
            compiled = lower(as_trained(captured), where.mesh, *owners.bind(*self._bound(is_first)))
            if settings.is_local:
                check_split(compiled, parts)
            return captured, compiled, guards, Constants.of(captured, guards, scalars, settings.device)

        def build(phase: Phase) -> tuple[Captured, Lowered, Guards, Constants]:
            made = self._numbers.build(make, is_able=not settings.options.specialize)
            captured, compiled, _, constants = made
            phase.texts["program"] = compiled.lines()
            self._joined.check(captured.partners, phase)
            phase.texts["tensors that the model keeps or the loss reads"] = [constants.digest()]
            return made

        captured, compiled, guards, constants = self._agreement.together("program", build)
        self._say(compiled.notes)
        self._joined.add(captured.partners)
        owners = Owners.of(self._store, captured.partners)
        owners.place(compiled)
        missing = [axis for axis in compiled.axes if axis not in self._groups]
        self._groups.update(make_groups(where.mesh, missing, where.device_mesh))
        program = compiled.program
        slots = tuple((entry, record(node).layout) for node, entry in program.entries)
        runner = make_runner(compiled, self._groups, settings.compiler, self._agreement, settings.device)
        return Running(captured, compiled, runner, slots, constants, owners), guards

    def _say(self, notes: Sequence[str]) -> None:
        """Log a program's notes on rank 0, each once: another batch's program mostly has the same."""
        if dist.get_rank() == 0:
            for note in notes:
                if note not in self._said:
                    _log.warning("%s", note)
            self._said.update(notes)

    def _bound(self, is_first: bool) -> tuple[StepOptions, Fixed]:
        """The options of a program, and what is decided: the layouts and stages of the first one bind the others."""
        options, fixed = self._settings.options, self._settings.fixed
        if is_first:
            return options, fixed
        sequence: SequenceParallel = "auto" if options.sequence_parallel else False
        # What divided the first batch need not divide the last of an epoch, nor every sequence.
        bound = replace(options, shard=None, sequence_parallel=sequence)
        return bound, replace(fixed, owners=self._store.stages, uneven=True)
