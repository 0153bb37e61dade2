"""Make the program of a call on every rank: captured, bound to what is decided, compiled, agreed on, ready to run."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from autopar.capture import Captured, Earlier
from autopar.capture.data.reads import Answers
from autopar.capture.python.guards import Change, Guards
from autopar.capture.python.scalars import NumberPlace, Scalars, places_of
from autopar.capture.python.spots import Numbers, Spot
from autopar.capture.step_kind import StepKind
from autopar.compiler.compile import Dealing, capture_step, lower
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError, CaptureError
from autopar.ir.mesh import PIPELINE, group_name
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Decided, Fixed
from autopar.ir.program import Program
from autopar.parallel.agree.agreement import Phase, lost_peers
from autopar.parallel.programs.cache_entry import Bound, ReadBack
from autopar.parallel.programs.constants import Constants
from autopar.parallel.programs.make_runner import make_runner, recorded, recordings
from autopar.parallel.programs.portions import FollowedSamples, Given, naming_parts
from autopar.parallel.programs.program_cache import HandedPrograms, ProgramCache, WantedProgram
from autopar.parallel.programs.running import Built, Running
from autopar.parallel.programs.shared_batch import lying_in_model
from autopar.parallel.session.session import Session
from autopar.parallel.weights.owners import Joined, Owners, as_trained, check_partners
from autopar.report.memory.within_memory import lower_within
from autopar.runtime.executor.inputs import slots_of
from autopar.runtime.ranks.process_groups import Group, connect, default_group, has_queues, make_groups

_log = logging.getLogger("autopar")
_CHANGES = 2  # of a number, after which it is expected to change again
_ANOMALY = (
    "torch's anomaly detection is on, and looks at nodes of autograd, of which a program has none: "
    'parallelize(..., on_nonfinite="stop") names the first value that is not finite'
)
T = TypeVar("T")


class Maker:
    """Makes the programs of one parallel module. What one rank cannot make is an error on all of them."""

    def __init__(self, session: Session) -> None:
        self._settings, self._store, self._agreement = session.settings, session.store, session.agreement
        self.numbers = ChangingNumbers()
        self._followed = FollowedSamples(session.store.model)
        self._decided: dict[Hashable, Decided] = {}  # layouts of the first program of each structure
        self._read_back: list[Lowered] = []  # of which these layouts are not known yet
        self._cache: ProgramCache | HandedPrograms | None = None
        if session.settings.cache is not None:
            self._cache = ProgramCache(session, session.settings.cache)
        elif session.settings.is_handed:
            self._cache = HandedPrograms(session)
        # Captures of each kind of step, with gradients on or off; by the micro-batches that a loss may ask.
        self._earlier = defaultdict[tuple[StepKind, bool], defaultdict[int, Earlier]](lambda: defaultdict(Earlier))
        self._sequence: dict[bool, bool] = {}  # of training steps, and of others: what "auto" was decided to mean
        self._joined = Joined(session.settings.device)
        self._groups: dict[str, Group] = {}
        self._tier = session.tier
        self._lower = lower if session.settings.options.memory is None else lower_within
        self._recordings = recordings(session.settings.graphs, session.settings.device)
        self._said: set[str] = set()

    def make(self, given: Given, numbers: Numbers, kind: StepKind, is_first: bool, answers: Answers) -> Running:
        """The program for a call with these arguments. Every rank must call this.

        numbers: those among the arguments. is_first: of the model's programs, so that it decides the layouts. answers:
        what is known of the step.
        """
        if is_first:
            given.check_first()
        is_able = not self._settings.options.specialize

        def compile_() -> Built:
            return self.numbers.build(
                lambda scalars: self._built(given, numbers, kind, is_first, scalars, answers), is_able
            )

        give = compile_ if self._cache is None else self._found(given, numbers, kind, is_first, answers, compile_)

        def build(phase: Phase) -> Built:
            built = give()
            if not given.is_unlike:
                phase.texts["program"] = built.compiled.lines()
            self._joined.check(built.captured.partners, phase)
            phase.texts["tensors that the model keeps or the loss reads"] = [built.constants.digest()]
            return built

        built = self._agreement.together("program", build)
        self._say([*built.compiled.notes, *built.guards.notes, *[_ANOMALY] * torch.is_anomaly_enabled()])
        self._joined.add(built.captured.partners)
        return self._ready(built)

    def _found(
        self, given: Given, numbers: Numbers, kind: StepKind, is_first: bool, answers: Answers,
        compile_: Callable[[], Built],
    ) -> Callable[[], Built]:  # fmt: skip
        """What gives the program: of an earlier run, or compiled. Every rank must call this."""
        assert self._cache is not None
        settings, owners = self._settings, Owners.of(self._store, ())
        options, fixed = self._fixed_for(given, is_first, kind)
        bound = Bound(self._store.distributor.mesh, *owners.bind(options, replace(fixed, decided={})))
        portion = given.portion
        said = {
            "numbers": len(self.numbers.inputs), "graphs": settings.graphs, "lift": settings.lift, "dims": given.dims,
            "answers": answers.values, "batch": settings.batch, "specialize": options.specialize,
            "left": sorted(each.name for each in answers.left),
            "lies": lying_in_model(self._store.model, list(given.parts.tensors())),
            "portion": None if portion is None else (portion.dims, portion.sizes, portion.is_said, portion.is_own),
        }  # fmt: skip

        decided, before = dict(self._decided), tuple(self._read_back)

        def passes(captured: Captured) -> Sequence[tuple[str, Program]]:
            for structure, layouts in (compiled.decided for compiled in before):
                decided.setdefault(structure, layouts)
            return lower_within(
                as_trained(captured), bound.mesh, bound.options, replace(bound.fixed, decided=decided)
            ).history

        give = self._cache.built(WantedProgram(given, numbers, kind, said, bound, passes), compile_)

        def followed() -> Built:
            built = give()
            if isinstance(built.compiled, ReadBack):
                self._read_back.append(built.compiled)
                if built.compiled.sequence is not None:
                    self._sequence.setdefault(kind.trains, built.compiled.sequence)
                built = replace(built, rows=self._followed.rows(built.compiled, given, kind))
            return built

        return followed

    def _built(
        self, given: Given, numbers: Numbers, kind: StepKind, is_first: bool, scalars: Scalars, answers: Answers
    ) -> Built:
        """The program, built by this rank alone: no data moves between ranks. scalars: numbers that are inputs."""
        is_own = given.portion is not None and given.portion.is_own
        settings, model, mesh = self._settings, self._store.model, self._store.distributor.mesh
        # No fact of the data is asked of a place, which knows its own alone, nor for a recording, which knows none.
        answers = replace(answers, asks=not is_own and not settings.graphs)
        self._know_decided()
        options, fixed = self._fixed_for(given, is_first, kind)
        dealing = Dealing(mesh, options, fixed, given.dims, self._earlier[kind, torch.is_grad_enabled()])
        with scalars, given.carrying(numbers), naming_parts(given):
            args, kwargs = given.arguments(numbers)
            captured = capture_step(
                model, settings.loss_fn, args, kwargs, replace(settings.options, batch_dims=None), dealing,
                kind=kind, lift=settings.lift, answers=answers,
            )  # fmt: skip
        if settings.is_own and captured.coins is not None and captured.coins.is_alone:
            raise CaptureError(
                'batch="ddp": random numbers decide which calls a step makes, others on each rank, and all run one '
                'program. Write batch="local", whose step is that of all parts together.'
            )
        guards = Guards(model, settings.loss_fn if kind.gives_loss else None, captured.ran, scalars, numbers)
        scalars.check(captured.constants, guards.places, captured.result_leaves)
        check_partners(captured, model, mesh, settings.options)
        owners = Owners.of(self._store, captured.partners)
        with naming_parts(given):
            compiled = self._lower(as_trained(captured), mesh, *owners.bind(options, fixed))
        rows = self._followed.rows(compiled, given, kind)
        structure, decided = compiled.decided
        self._decided.setdefault(structure, decided)
        if compiled.sequence is not None:
            self._sequence.setdefault(kind.trains, compiled.sequence)
        constants = Constants.of(captured, guards, scalars, settings.device)
        return Built(captured, compiled, guards, constants, rows, kind)

    def _fixed_for(self, given: Given, is_first: bool, kind: StepKind) -> tuple[StepOptions, Fixed]:
        """The options of a program, and what is decided, by the programs before it and by the parts of its batch."""
        options, fixed = self._bound(is_first, kind)
        if given.portion is not None and not given.portion.is_even:
            fixed = replace(fixed, uneven=True)
        return options, replace(fixed, is_own=given.portion is not None and given.portion.is_own)

    def _bound(self, is_first: bool, kind: StepKind) -> tuple[StepOptions, Fixed]:
        """The options of a program, and what is decided: the layouts and stages of the first one bind the others."""
        options, fixed = self._settings.options, self._settings.fixed
        if is_first:
            # A look at one sample before the training: what it lets every rank compute is not much.
            return options, replace(fixed, uneven=fixed.uneven or not kind.trains)
        sequence: SequenceParallel = "auto" if options.sequence_parallel else False
        # What divided the first batch need not divide the last of an epoch, nor every sequence.
        bound = replace(options, shard=None, sequence_parallel=sequence)
        wanted = True if options.sequence_parallel is True else self._sequence.get(kind.trains)
        return bound, replace(
            fixed, owners=self._store.stages, uneven=True, decided=dict(self._decided), sequence=wanted
        )

    def _know_decided(self) -> None:
        """Learn the layouts that programs of earlier runs decided: only what is compiled here asks for them."""
        for structure, decided in (compiled.decided for compiled in self._read_back):
            self._decided.setdefault(structure, decided)
        self._read_back.clear()

    @uncollected()  # thousands of objects that stay
    def _ready(self, built: Built) -> Running:
        """A program that all ranks agreed on, with its tensors where it wants them."""
        compiled, settings, where = built.compiled, self._settings, self._store.distributor
        owners = Owners.of(self._store, built.captured.partners)
        owners.place(compiled)
        missing = [axis for axis in compiled.axes if axis not in self._groups]
        self._connect(missing, compiled)
        slots = slots_of(compiled.program, compiled.pipeline, where.coord)
        runner = make_runner(compiled, self._groups, self._agreement, settings.device, self._tier)
        if self._recordings is not None:
            runner = recorded(runner, compiled, slots, owners.parameters(), self._recordings)
        return Running(built, runner, slots, self._store, owners)

    def _connect(self, axes: list[str], compiled: Lowered) -> None:
        """Make the groups that are not there yet. Only NCCL has queues, and connects late."""
        where, settings = self._store.distributor, self._settings
        device = settings.device
        twice = (group_name(compiled.plan.zero_axes), PIPELINE) if has_queues(device) else ()
        made = make_groups(where.mesh, axes, where.device_mesh, settings.timeout, twice=twice)
        self._groups.update(made)
        if self._agreement.patience is not None:
            self._agreement.patience.know(handle for group in made.values() for handle in group.known)
        if has_queues(device):
            with lost_peers("connecting"):
                connect(made, compiled.pipeline, where.coord.get(PIPELINE, 0), device)

    def _say(self, notes: Sequence[str]) -> None:
        """Log a program's notes on rank 0, each once: another batch's program mostly has the same."""
        if default_group().rank() == 0:
            for note in notes:
                if note not in self._said:
                    _log.warning("%s", note)
            self._said.update(notes)


@dataclass(slots=True)
class ChangingNumbers:
    """Counts how often a number changed. Which of them are inputs, and why others cannot be."""

    inputs: dict[NumberPlace, Spot] = field(default_factory=dict)
    refused: dict[NumberPlace, str] = field(default_factory=dict)
    _changed: dict[NumberPlace, int] = field(default_factory=dict)
    _new: list[NumberPlace] = field(default_factory=list)

    def saw(self, changes: Sequence[Change]) -> None:
        """Count the changes for which no program is known."""
        for change in changes:
            for place in places_of(change.key, change.old, change.new):
                self._changed[place] = self._changed.get(place, 0) + 1
                if self._changed[place] >= _CHANGES and place not in self.refused and change.new is not None:
                    if place not in self.inputs:
                        self._new.append(place)
                    self.inputs[place] = change.new

    def build(self, make: Callable[[Scalars], T], is_able: bool) -> T:
        """What `make` gives with these inputs, or without those for which it fails. is_able: values of tensors are not
        read, which may be computed of such numbers."""
        if not is_able:
            for place in list(self.inputs):
                self._refuse(place, "may be part of what specialize=True reads")
        while True:
            scalars = Scalars(self.inputs)
            try:
                made = make(scalars)
            except AutoparError as error:
                if not scalars.put:
                    raise
                blamed = [place for place in scalars.misuse.reasons if place in self.inputs] or self._new or self.inputs
                for place in list(blamed):
                    self._refuse(place, scalars.misuse.reasons.get(place) or str(error).split("\n")[0])
            else:
                for place in self._new:
                    _note(f"{self.inputs[place]} changed twice: it is an input of the program from now on")
                self._new.clear()
                return made

    def _refuse(self, place: NumberPlace, why: str) -> None:
        spot = self.inputs.pop(place)
        self.refused[place] = why
        if place in self._new:
            self._new.remove(place)
        _note(
            f"{spot} changed twice, but cannot be an input of the program: the number {why}. So it is compiled again "
            f"for each value. A tensor there (torch.tensor(...), filled or replaced by others) is read anew at each "
            f"step by one program: make '{spot.name}' one, or pass it with the batch"
        )


def _note(text: str) -> None:
    if default_group().rank() == 0:
        _log.warning("%s", text)
