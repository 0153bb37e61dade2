"""Make the program of a call on every rank: built by each, agreed on, ready to run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from autopar.capture.python.guards import Guards
from autopar.capture.python.spots import Numbers
from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import PIPELINE, group_name
from autopar.parallel.agree.agreement import Phase, lost_peers
from autopar.parallel.programs.bindings import Bindings
from autopar.parallel.programs.building import Built, ProgramBuilder
from autopar.parallel.programs.execution import Running, make_runner
from autopar.parallel.programs.numbers import ChangingNumbers
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.recordings import Recordings
from autopar.parallel.session.session import Session
from autopar.parallel.weights.owners import Joined, Owners
from autopar.runtime.executor.inputs import slots_of
from autopar.runtime.ranks.process_groups import Group, connect, has_queues, make_groups

_log = logging.getLogger("autopar")


class Maker:
    """Makes the programs of one parallel module. What one rank cannot make is an error on all of them."""

    def __init__(self, session: Session, numbers: ChangingNumbers) -> None:
        self._settings, self._store, self._agreement = session.settings, session.store, session.agreement
        self._builder, self._joined = ProgramBuilder(session, numbers), Joined(session.settings.device)
        self._groups: dict[str, Group] = {}
        self._recordings = Recordings(session.settings.graphs, session.settings.device)
        self._said: set[str] = set()

    def make(self, given: Given, numbers: Numbers, train: bool, is_first: bool) -> tuple[Running, Guards]:
        """The program for a call with these arguments, and what it read in Python. Every rank must call this.

        numbers, is_first: as of `ProgramBuilder.build`.
        """

        if is_first:
            given.check_first()

        def build(phase: Phase) -> Built:
            built = self._builder.build(given, numbers, train, is_first)
            if not given.is_unlike:
                phase.texts["program"] = built.compiled.lines()
            self._joined.check(built.captured.partners, phase)
            phase.texts["tensors that the model keeps or the loss reads"] = [built.constants.digest()]
            return built

        built = self._agreement.together("program", build)
        self._say([*built.compiled.notes, *built.guards.notes])
        self._joined.add(built.captured.partners)
        return self._ready(built), built.guards

    def _ready(self, built: Built) -> Running:
        """A program that all ranks agreed on, with its tensors where it wants them."""
        compiled, settings, where = built.compiled, self._settings, self._store.distributor
        owners = Owners.of(self._store, built.captured.partners)
        owners.place(compiled)
        missing = [axis for axis in compiled.axes if axis not in self._groups]
        self._connect(missing, compiled)
        slots = slots_of(compiled.program, compiled.pipeline, where.coord)
        runner = make_runner(compiled, self._groups, self._agreement, settings.device)
        runner = self._recordings.of(runner, compiled, slots, owners.parameters())
        bound = Bindings(compiled, slots, self._store, owners, built.constants)
        return Running(built.captured, compiled, runner, bound, built.constants, built.rows)

    def _connect(self, axes: list[str], compiled: Lowered) -> None:
        """Make the groups that are not there yet. Only NCCL has queues, and connects late."""
        where, device = self._store.distributor, self._settings.device
        twice = (group_name(compiled.plan.zero_axes), PIPELINE) if has_queues(device) else ()
        made = make_groups(where.mesh, axes, where.device_mesh, twice=twice)
        self._groups.update(made)
        if has_queues(device):
            with lost_peers("connecting"):
                connect(made, compiled.pipeline, where.coord.get(PIPELINE, 0), device)

    def _say(self, notes: Sequence[str]) -> None:
        """Log a program's notes on rank 0, each once: another batch's program mostly has the same."""
        if dist.get_rank() == 0:
            for note in notes:
                if note not in self._said:
                    _log.warning("%s", note)
            self._said.update(notes)
