"""One differentiating trace of a training step: forward, loss and backward, on fake tensors."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.backward_changes import BackwardChanges
from autopar.capture.captured import Captured, leaf_of
from autopar.capture.changed_state import ChangedState
from autopar.capture.data.casts import default_dtype, idle_autocast
from autopar.capture.data.determinism import HostDrawsFound, Steady
from autopar.capture.data.foreign import foreign_state
from autopar.capture.data.item_values import check_returned, returned
from autopar.capture.data.reads import Answers, Reads, Unknown, known_inputs
from autopar.capture.data.recorded_calls import RecordedCalls
from autopar.capture.data.so_far import SoFar, fake_like
from autopar.capture.draws.host_draws import HostDraws, States, drawn_anew, generators, names_made_anew, set_generators
from autopar.capture.draws.host_inputs import Floats, HostInputs
from autopar.capture.draws.joins import CoinPlan, Sides, plan
from autopar.capture.draws.step_coins import CoinFound, Coins, StepCoins
from autopar.capture.draws.trail import Trail
from autopar.capture.forks import Forks, captured
from autopar.capture.given_tensors import give_tensors
from autopar.capture.inputs import tables
from autopar.capture.inputs.containers import Form, put_together, take_apart, take_call_apart
from autopar.capture.inputs.in_parts import InParts
from autopar.capture.inputs.leaves import without_data
from autopar.capture.inputs.loss_outputs import LossFn, check_loss, has_own_backward, loss_of, split_result
from autopar.capture.inputs.module_state import (
    SCRATCH,
    State,
    Step,
    as_given,
    attributes,
    check_buffers,
    device_of,
    fakes_of,
    name_if_trained,
    once_each,
    scratch_among,
    state_of,
    unmoved,
    unsynced,
)
from autopar.capture.inputs.outside import Outside, outside_fault
from autopar.capture.inputs.partners import Partners, UnknownPartner
from autopar.capture.leftovers import Leftovers, settled
from autopar.capture.ops.decompositions import decompositions
from autopar.capture.python.attributes import Attributes
from autopar.capture.python.counters import CountedNumbers
from autopar.capture.python.left_values import LeftByOthers, LeftValue
from autopar.capture.python.ran import Ran
from autopar.capture.python.stand_in import mark_number, stands_for_number
from autopar.capture.raising import Raise
from autopar.capture.refusals.explain_failure import StepCall, explain
from autopar.capture.refusals.location import Locator
from autopar.capture.resizing.earlier import Earlier
from autopar.capture.resizing.resizing import Resizing
from autopar.capture.rows.row_sides import Has, RowSides, RowUses, UnfitRows, row_uses
from autopar.capture.rows.selected import Selected
from autopar.capture.step_kind import StepKind
from autopar.capture.trace.normalise import functional, normalise, without_seed
from autopar.capture.trace.results import Results
from autopar.capture.trace.tracer import Traced, Tracer, Unseen
from autopar.capture.trace.writes import check_collectives, check_writes
from autopar.errors import AutoparError, CaptureError
from autopar.ir.program import INPUT_GRADIENT, Input, Output, Program
from autopar.torch_compat import FakeTensorMode, gradients, quiet

__all__ = ["Captured", "LossFn", "capture", "fake_like", "loss_of", "state_of"]


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    kind: StepKind = StepKind.TRAINING,
    lift: torch.dtype | None = None,
    specialize: bool = False,
    precision: str | None = None,
    statistics: str = "batch",
    microbatches: int = 1,
    earlier: Earlier | None = None,
    answers: Answers | None = None,
) -> Captured:
    """Trace one step of `model` on a batch (tensors and arrays in any containers; their values are not read).

    The program of a training step returns the loss, the gradient of every parameter that has one, and the new buffers;
    others the loss or the model's output, with gradients as its caller has them. `loss_fn(model, *args, **kwargs)`
    gives the loss; None if the module itself does. `lift`: the dtype that its own casts to floats go to. `specialize`:
    values that the model reads from tensors are taken from the batch, which then needs data. `precision`: with a short
    float the model's own casts stay in the program even where they change nothing yet, and with "fp16" the gradients
    are those of the loss times an input of kind "scale". `statistics`: of which samples norms take mean and variance;
    those of a "rank" or a "microbatch" are told by the pass `group`. `microbatches`: of all data ranks, to which
    `autopar.per_microbatch` deals the batch. `earlier`: captures of the same step at other sizes, which may tell its
    program. `answers`: what is known of the step that is meant. Raises CaptureError with the user's line.
    """
    left, start, draws = Leftovers(), generators(), None
    known = answers or Answers()
    asked = Reads(is_permitted=specialize, given=known.values, told=len(known.values), asks=known.asks)

    def run(reads: Reads, forks: Forks) -> Captured:
        others = None if specialize or forks.sides is not None else earlier
        coins = Coins(known.seed)
        step = model, loss_fn, args, dict(kwargs), kind, lift, reads, precision, forks
        made = _Capture(*step, others, coins)
        made.statistics, made.microbatches, made.others.values = statistics, microbatches, known.left
        if draws is not None:
            made.start, made.draws, made.resizing = start, draws, Resizing(None)
        try:
            return made.run()
        finally:
            coins.dismiss()
            left.dismiss([calls.values for calls in made.runs], made.graphs)

    while True:
        try:
            return settled(partial(captured, run, asked), left, lift)
        except HostDrawsFound as found:
            if draws is not None and found.floats <= draws:
                raise
            draws = found.floats if draws is None else draws | found.floats


Trainable = list[tuple[str, torch.Tensor]]  # parameters with their names


class _Capture:
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: dict[str, Any], kind: StepKind,
        lift: torch.dtype | None, reads: Reads, precision: str | None, forks: Forks,
        earlier: Earlier | None, coins: Coins,
    ) -> None:  # fmt: skip
        self.coins, self.hosts = coins, list[list[torch.Tensor]]()  # of each run, if they are drawn
        self.start: States | None = None  # of the generators, where each run draws the same
        self.draws: Floats | None = None  # where it draws on the host: the floats that calls are given
        self.step_coins: StepCoins | None = None
        self.asks_rows = False  # the model asks for the number of rows, or goes through the places of a mask
        self.row_uses: RowUses | None = None  # where it matters which masks select rows
        self.selected = self.current = Selected()  # rows of the run that is captured, and of the one that goes on
        self.graphs, self.runs = list[fx.Graph](), list[RecordedCalls]()  # all of the capture's
        self.forks, self.resizing = forks, Resizing(earlier)
        self.model, self.kind, self.lift, self.reads = model, kind, lift, reads
        self.loss_fn = loss_fn if kind.gives_loss else None
        self.call = StepCall(model, self.loss_fn, kind.gives_loss, args, kwargs)
        self.keeps_casts, self.is_scaled = precision in ("bf16", "fp16"), precision == "fp16" and kind.trains
        self.scale: torch.Tensor | None = None
        self.selects = (False, False)  # rows, by a mask; and they could be taken by their number
        self.unknown: Unknown | UnknownPartner | CoinFound | None = None
        self.partners = Partners(model, loss_fn)
        self.left, self.before = ChangedState(self.partners), Attributes(model)
        self.backward = BackwardChanges(self.before)
        self.parts, self.state = take_call_apart(args, kwargs), state_of(model)
        self.fake, self.device = FakeTensorMode(allow_non_fake_inputs=True), device_of(model)
        self.locator, self.in_parts, self.outputs = Locator(), InParts(self.fake, self.device), list[Output]()
        self.has_random_ops = self.has_items = self.may_specialize = False
        self.result: tuple[Form | None, tuple[Any, ...]] = (None, ())
        self.calls, self.calling, self.ran = RecordedCalls(), None, Ran()
        self.asked: Callable[[], Trainable] = list  # tensors of the batch that get a gradient, by their numbers
        self.replaced, self.carried, self.notes = dict[str, Any](), dict[str, Any](), list[str]()
        self.untrained, self.outside = dict[int, str](), dict[int, Outside]()  # plain attributes that need a gradient
        self.fault: AutoparError | None = None
        self.others, self.left_values = LeftByOthers(self.fake, self.device), list[LeftValue]()
        self.statistics, self.microbatches, self.has_grads = "batch", 1, kind.trains or torch.is_grad_enabled()
        self.scratch, self.scratch_fault = frozenset[str](), CaptureError("")  # buffers, and else what is wrong

    def run(self) -> Captured:
        before, drawn = self.before, foreign_state()
        try:
            autocast = idle_autocast(self.device.type) if self.keeps_casts else nullcontext()
            with quiet(), default_dtype(self.lift), autocast:
                self.resizing.begin(self.model, self.loss_fn)
                traced, inputs, fakes = self._whole_trace(before)
                if self._finds_scratch(fakes):
                    before.restore()
                    self.state = self._state()
                    traced, inputs, fakes = self._whole_trace(before)
                is_plain = self._is_plain(before, drawn)
                self._check_buffers(fakes)
                if self.resizing.foreseen is not None:
                    check_writes(traced, inputs, self._given(), self.locator)  # earlier ones lay in other memory
                    known = self.resizing.program(self.notes) if is_plain else None
                    is_enough = known is not None and known[2] and not self.others.values
                    if known is not None and (is_enough or not self._steady(fakes, before, drawn)):
                        self.ran.is_whole = True
                        return self._captured(*known[:2])
                    before.restore()
                    self.resizing, self.ran = Resizing(self.resizing.earlier), Ran()
                    traced, inputs, fakes = self._whole_trace(before)
                    is_plain = is_plain and self._is_plain(before, drawn)
                told, way, hosts = self.notes, self.calls.way(), self.hosts[-1:]
                check_collectives(traced, self.locator)
                notes = told + check_writes(traced, inputs, self._given(), self.locator)
                notes += [*self._steady(fakes, before, drawn), *self.left.copied]
                if self.fault is not None:  # what made that tensor, if the model did, is told first
                    raise self.fault
                if not self.ran.is_whole:  # shapes alone did not do: what runs is seen in another trace
                    before.restore()
                    self.resizing, is_plain = Resizing(None), False
                    with self.ran.watch():
                        self._trace(fakes)
                traced = functional(traced, fakes, self.fake)
        except AutoparError:
            raise
        except UnfitRows:
            self.reads.has_counted = True
            raise CaptureError("the model does more without rows than to leave calls out") from None
        except Exception as error:
            raise explain(error, self.calling, self.locator, self.may_specialize, self.call) from error
        finally:
            before.restore()
        self.graphs.append(traced.graph)
        program, constants = normalise(traced, tuple(inputs), tuple(self.outputs), self.keeps_casts)
        if not self.has_random_ops:
            program = without_seed(program)
        notes += self.step_coins.notes() if self.step_coins is not None else []
        program = program.with_(notes=(*notes, *(read.note for read in self.reads.known)))
        if is_plain:
            self.resizing.keep(program, constants, told, self.ran)
        found = self._captured(program, constants)
        if self.start is None:
            return found
        host = HostDraws(way, names_made_anew(constants, hosts[0], self.hosts[-1]), self._replay())
        notes = [*program.notes, host.note(self.start, self.step_coins)]
        return replace(found, program=program.with_(notes=tuple(notes)), host=host)

    def _replay(self) -> Callable[[torch.Tensor], tuple[int, tuple[torch.Tensor, ...]]]:
        """Draws anew, by the seed of a step: a run on shapes. It holds no tensor of the batch."""
        parts, reads = self.parts, self.reads.anew(self.reads.known, guards=True)
        leaves = [without_data(x) if isinstance(x, torch.Tensor) else x for x in parts.leaves]
        plan, form, given = self.coins.planned(), parts.form, (self.model, self.loss_fn)
        coins, in_parts, state, draws = self.step_coins, self.in_parts, self.state, self.draws
        kind, lift, keeps_casts, partners = self.kind, self.lift, self.keeps_casts, self.partners

        def replay(seed: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
            args, kwargs = put_together(form, leaves)
            again = reads.anew(reads.known)
            step = _Capture(*given, args, kwargs, kind, lift, again, None, Forks(), None, plan())
            before, step.keeps_casts, step.partners = step.before, keeps_casts, partners
            step.state, step.draws, step.in_parts = state, draws, in_parts
            step.coins.decided.update({} if coins is None else coins.floats(seed))
            calls, way = RecordedCalls(), 0
            try:
                with quiet(), default_dtype(lift):
                    step._again(fakes_of(step._given(), step.fake, step.device), calls, is_watched=False)
                way = calls.way()
            except (Exception, Unknown, CoinFound):  # another way, of which its own capture says what is wrong
                way = 0
            finally:
                before.restore()
                step.coins.dismiss()
            return way, tuple(step.hosts[-1])

        return replay

    def _captured(self, program: Program, constants: Mapping[str, torch.Tensor]) -> Captured:
        """What was captured. constants: those that are not the model's own."""
        kept = {entry.name: tensor for entry, tensor in self.state.entries if entry.kind == "constant"}
        reads, partners, left = tuple(self.reads.known), tuple(self.partners.known.values()), tuple(self.left_values)
        return Captured(
            program, {**kept, **constants}, *self.result, reads, self.state.frozen, partners, self.ran, None,
            self.step_coins, self.row_uses, self.selected.draws.found, None, self.left.rebound, self.left.leaves, left,
        )  # fmt: skip

    def _steady(self, fakes: list[torch.Tensor], before: Attributes, drawn: Mapping[str, Any]) -> list[str]:
        """Notes of a second run; see `Steady.check`."""
        drawn, hosts = foreign_state() if self.start is not None else drawn, self.hosts[-1:]
        run, names = partial(self._again, fakes), frozenset(n for entry, _ in self.state.entries for n in entry.names)
        counters = partial(CountedNumbers.of, self.model, self.loss_fn, self.ran)
        ways = partial(setattr, self.coins, "variant"), *self.selects, counters, self.others, self.left_values
        steady = Steady(self.partners.submodule, run, self.calls, before, self.replaced, drawn, names, *ways)
        try:
            notes, second = [*steady.check(), *map(SCRATCH.format, self.scratch)], len(self.hosts)
        except CaptureError as error:
            if self.scratch and not isinstance(error, HostDrawsFound):
                raise self.scratch_fault from None
            raise
        self.backward.check(steady, partial(self._trace, fakes))
        if self.start is not None:
            start, self.start = self.start, None
            steady.check_floats_of_host()
            self.start = start
            if self.step_coins is not None:
                self.step_coins.check(drawn_anew(hosts[0], self.hosts[second:]))
            del self.hosts[second:]
        return notes

    def _is_plain(self, before: Attributes, drawn: Mapping[str, Any]) -> bool:
        """True if the graph of the step is all that there is to say of it; see `earlier.py`."""
        is_other = bool(self.partners.known or self.in_parts.entries or self.forks.lines or self.reads.known)
        is_other |= any(self.selects) or self.calls.has_floats or self.has_items or self.coins.is_sought
        is_other |= self.draws is not None or bool(self.replaced or self.left.written)
        return not (is_other or before.changes()) and foreign_state() == drawn

    def _whole_trace(self, before: Attributes) -> tuple[Traced, list[Input], list[torch.Tensor]]:
        """The trace of the step with its inputs: begun again after each partner, read and tensor in parts it meets."""
        while True:
            given = self._given()
            fakes = fakes_of(given, self.fake, self.device)
            traced = self._trace(fakes)
            if self.in_parts.are_new():
                before.restore()
                self.state = self._state()
            elif isinstance(self.unknown, UnknownPartner):
                partner = self.partners.add(self.unknown)
                before.restore()
                if partner is not None:
                    before.add(partner.traced, partner.name)
                self.state = self._state()
            elif isinstance(self.unknown, CoinFound):
                before.restore()
                self.coins.look(partial(self._plan, fakes, before))
            elif self.left.finds_writes(traced.graph, [entry for entry, _ in given]):
                before.restore()
            elif self.unknown is not None:
                traced = functional(traced, fakes, self.fake)
                self.reads.learn(self.unknown, *known_inputs(traced, self.unknown, given, self.device))
                before.restore()
            else:
                names = [name_if_trained(*entry) for entry in given] if self.kind.trains else []
                self.step_coins = self.coins.of_step(names)
                if self._knows_rows(fakes, before, names):
                    return traced, [entry for entry, _ in given], fakes

    def _knows_rows(self, fakes: list[torch.Tensor], before: Attributes, names: Sequence[str | None]) -> bool:
        """False if the step has to put out how many rows masks select, and does not yet."""
        if self.row_uses is not None or self.reads.counts or not self.asks_rows:
            return True

        def run(has: Has) -> RowSides:
            mode = self._on_shapes(fakes, before, None, RowSides.of(has))
            order = None if mode is None else mode.selected.order
            if order is None or order.sides is None or order.lines != self.selected.order.lines:
                raise UnfitRows
            return order.sides

        found = row_uses(run, names)
        self.row_uses = found if self.kind.trains else None
        return self.row_uses is None

    def _given(self) -> list[tuple[Input, torch.Tensor | None]]:
        """What the step takes."""
        given: list[tuple[Input, torch.Tensor | None]] = list(self.state.entries)
        given += [(Input("batch", (str(i),)), tensor) for i, tensor in self.parts.tensors()]
        given += [(Input("scale", ("loss_scale",)), None)] * self.is_scaled
        return [*given, (Input("seed", ("seed",)), None)]

    def _trace(self, fakes: list[torch.Tensor], is_next: bool = False) -> Traced:
        """The whole step, or all of it before what is not known yet (`self.unknown`). is_next: after the last one."""
        self.carried = self.replaced if is_next else {}
        self.calls, self.replaced, self.unknown, self.locator.phase = RecordedCalls(), {}, None, "forward"
        self.tracer = Tracer(fakes, decompositions(), Results(self.fake))
        self.graphs.append(self.tracer.graph)
        with self.locator.follow(self.partners.all_modules()):
            return self.tracer.trace(self._traced, fakes, self.fake)

    def _mode(
        self, locator: Locator, inputs: Sequence[torch.Tensor], calls: RecordedCalls, reads: Reads,
        is_first: bool = True,
    ) -> Raise:  # fmt: skip
        """What sees the calls of a run."""
        self.runs.append(calls)
        mode = Raise(locator, inputs[-1], self.lift, calls, reads, self.keeps_casts, self.partners, is_first)
        mode.forks, mode.statistics, mode.microbatches = self.forks, self.statistics, self.microbatches
        return mode

    def _traced(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        mode = self._mode(self.locator, inputs, self.calls, self.reads)
        self.outside, mode.ran, mode.selected.tracer = mode.outside, self.ran, self.tracer
        mode.selected.order.tracer = self.tracer
        self.selected, mode.selected.order.counts = mode.selected, None if self.row_uses is None else []
        self._start(mode, self.tracer)
        body = self._loss_body if self.kind.gives_loss else self._output_body
        try:
            with self.resizing.watching(self.ran):
                result = self._run(inputs, mode, body, self.replaced, self.carried)
        except (Unknown, UnknownPartner, CoinFound) as found:
            self.unknown = found
            return (found.tensor if isinstance(found, Unknown) else inputs[-1],)
        finally:
            self.calling, self.may_specialize = mode.culprit(), mode.may_specialize and mode.permitted is None
            self.notes, self.reads.so_far, self.reads.state = mode.told(), None, None
            self.ran.values = mode.values
            self.ran.differentiate(self.backward.trainable, mode.differentiated)
        self.has_random_ops, self.has_items = bool(mode.random_ops), bool(mode.items.made)
        mode.items.close()
        mode.selected.check_leaving(result)
        mode.selected.check_counts()
        self.asks_rows = bool(mode.selected.asked) or mode.selected.order.is_turned
        self.selects = bool(mode.selected.known), mode.selected.may_specialize
        return tuple(result)

    def _start(self, mode: Raise, tracer: Tracer | None = None, sides: Sides | None = None) -> None:
        """A run begins. tracer, sides: as of `Coins.start`."""
        mode.coins, mode.in_parts, self.current = self.coins, self.in_parts, mode.selected
        if self.draws is not None:
            if self.start is not None:
                set_generators(self.start)
            mode.hosts = HostInputs(self.draws, mode.calls.floats, self.coins)
            self.hosts.append(mode.hosts.tensors)
        self.coins.start(mode.inputs, tracer, sides)
        self.forks.start()
        self.reads.start(*(() if tracer is None else SoFar.of(tracer, self._given())))

    def _again(self, inputs: list[torch.Tensor], calls: RecordedCalls, is_watched: bool = True) -> None:
        """Forward and loss once more, on shapes alone; what the model prints is printed already. is_watched: no line is
        looked for meanwhile, which another trace function does."""
        with self.fake, Unseen(Results(self.fake)), redirect_stdout(io.StringIO()):
            mode = self._mode(Locator(), inputs, calls, self.reads, is_first=False)
            mode.ran = self.ran
            self._start(mode)
            with self.ran.watch() if is_watched else nullcontext():
                self._run(inputs, mode, lambda _: partial(self._ended, None), self.replaced, dict(self.replaced))
            self.ran.is_whole |= is_watched

    def _ended(self, rows: RowSides | None, *args: Any, **kwargs: Any) -> None:
        """The forward pass, and all that it gives."""
        result = self._result(*args, **kwargs)
        results = [*take_apart(result, lenient=True).leaves, *self.left.tensors()]
        if self.coins.trail is not None:
            self.coins.left(results)
        if rows is not None:
            rows.trail.leave(results)

    def _plan(self, inputs: list[torch.Tensor], before: Attributes, fixed: Sides) -> CoinPlan:
        """What to do about the coins, from runs on shapes with other sides."""

        def run(sides: Sides) -> Trail | None:
            return self.coins.trail if self._on_shapes(inputs, before, sides) is not None else None

        return plan(run, fixed)

    def _on_shapes(
        self, inputs: list[torch.Tensor], before: Attributes, coins: Sides | None, rows: RowSides | None = None
    ) -> Raise | None:
        """A run on shapes with other sides of its coins, or of its masks; None if it fails."""
        before.restore()
        reads = self.reads.anew(self.reads.known)  # another side may read other values
        with self.fake, Unseen(Results(self.fake)), redirect_stdout(io.StringIO()):
            mode = self._mode(Locator(), inputs, RecordedCalls(), reads, is_first=rows is None)
            mode.selected.order.sides = rows
            self._start(mode, None, coins)
            try:
                self._run(inputs, mode, lambda _: partial(self._ended, mode.selected.order.sides), {}, {})
            except (Exception, Unknown):
                return None
            finally:
                before.restore()
        return mode

    def _state(self) -> State:
        partners = {p.name: p.traced for p in self.partners.known.values()}
        return state_of(self.model, partners, self.scratch, self.in_parts.entries)

    def _finds_scratch(self, inputs: list[torch.Tensor]) -> bool:
        """True if buffers may be scratch: unless the second run reads what the first left in them."""
        self.scratch = scratch_among(as_given(self.state, inputs), self.left.buffers, self.partners.submodule)
        try:
            if self.scratch:
                self._check_buffers(inputs)
        except CaptureError as error:
            self.scratch_fault = error
        return bool(self.scratch)

    def _check_buffers(self, inputs: list[torch.Tensor]) -> None:
        run = partial(self._again, inputs, RecordedCalls(), is_watched=False)
        check_buffers(as_given(self.state, inputs), self.left.buffers, run, self._buffer)

    def _buffer(self, name: str) -> torch.Tensor:
        path, _, attribute = name.rpartition(".")
        return tables.buffer(self.partners.submodule(path), attribute)

    def _run(
        self, inputs: Sequence[torch.Tensor], mode: Raise, body: Callable[[Trainable], Callable[..., Any]],
        replaced: dict[str, Any], carried: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """What `body` gives for the model on these inputs, with the plain attributes that an earlier run left."""
        entries, written = self.state.entries, self.left.written
        given = give_tensors(entries, self.parts.leaves, inputs, mode.calls, self.in_parts, written)
        self.untrained.update(given.untrained)
        mode.inputs.update(given.parameters)
        mode.outside.update(given.outside)
        self.asked, self.scale = given.asked, given.extra[0] if self.is_scaled else None
        self.backward.trainable = given.trainable
        if self.coins.trail is not None:
            self.coins.trail.given(given.values)
        if mode.selected.order.sides is not None:
            mode.selected.order.sides.trail.given(given.values)
        self.left.begin(entries, given)
        constants = {**given.constants, **carried}
        mode.facts.begin(self.parts, given.leaves, mode.ran)
        args, kwargs = put_together(self.parts.form, given.leaves)
        step = Step(self.model, self.partners.known.values(), body(given.trainable), replaced)
        state = attributes(step, constants, replaced), unmoved(tables.modules(step)), unsynced(tables.modules(step))
        with mode, state[0], state[1], state[2], torch.set_grad_enabled(self.has_grads):
            return tables.functional_call(step, once_each(step, given.swapped), args, kwargs)

    def _result(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs) if self.loss_fn is None else self.loss_fn(self.model, *args, **kwargs)
        self.current.refresh(lambda function, *given: function(*given), self.left.tensors())
        return self.runs[-1].gave(result, self.model if self.loss_fn is None else self.loss_fn)

    def _loss_body(self, trainable: Trainable) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            with self.partners.watch(self.locator.stack):
                loss, aux = split_result(self._result(*args, **kwargs), self.loss_fn)
            if self.coins.trail is not None:
                loss, aux = self._joined(loss, aux)
            check_returned(loss)
            trained, asked = (trainable, self.asked()) if self.kind.trains else ([], [])
            sources = [*trained, *asked]
            if self.kind.trains:
                check_loss(loss, self.loss_fn, trained)
                self.fault = outside_fault(loss, {id(tensor) for _, tensor in sources}, self.untrained, self.outside)
            left = self.left.outputs(self.coins.joined, self.calls)
            self.outputs = [Output("loss", "loss"), *(Output("gradient", name) for name, _ in trained)]
            self.outputs += [*(Output(INPUT_GRADIENT, number) for number, _ in asked), *(out for out, _ in left)]
            # A module's own loss comes with logits that few read: who does says so with a loss function.
            values = [] if self.loss_fn is None and aux is not None else self._values(aux)
            if self.fault is None and self._ends([loss, *(tensor for _, tensor in left), *values], sources):
                return []
            grads = self._gradients(loss, [tensor for _, tensor in sources]) if self.kind.trains else ()
            if self.kind.trains:
                at, known = 1 + len(sources), len(left)
                left = self.left.outputs(self.coins.joined, self.calls)  # hooks may bind buffers anew
                self.outputs[at : at + known] = [out for out, _ in left]
                loss, *values = (value.detach() for value in (loss, *values))
            return [loss, *grads, *(tensor for _, tensor in left), *values, *self._guards()]

        return body

    def _gradients(self, loss: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        self.locator.phase, self.tracer.is_unseen = "backward", True  # torch's own ops: none of the user's casts
        is_own = self.calls.has_hooks or has_own_backward(loss)
        with self.backward.watch(self.ran, is_own):
            return gradients(loss if self.scale is None else loss * self.scale, tensors, is_whole=is_own)

    def _output_body(self, _: Trainable) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            with self.partners.watch(self.locator.stack):
                result = self._result(*args, **kwargs)
            if self.coins.trail is not None:
                (result,) = self._joined(result)
            self.outputs = []
            values = self._values(result)
            left = self.left.outputs(self.coins.joined, self.calls)
            self.outputs += [out for out, _ in left]
            if self._ends([*values, *(tensor for _, tensor in left)]):
                return []
            return [*values, *(tensor for _, tensor in left), *self._guards()]

        return body

    def _ends(self, results: Sequence[torch.Tensor], trainable: Trainable | None = None) -> bool:
        """True if the program is known at the end of the forward pass."""
        batch, names = [tensor for _, tensor in self.parts.tensors()], {id(tensor): n for n, tensor in trainable or ()}
        known = tuple(entry for entry, _ in self.state.entries), tuple(self.outputs), tuple(names.values())
        loss = None if trainable is None or not self.kind.trains else results[0]
        is_known = self.resizing.ends(self.tracer, batch, results, loss, names, known)
        self.ran = Ran() if self.resizing.earlier is not None and not is_known else self.ran
        return is_known

    def _values(self, result: Any) -> list[torch.Tensor]:
        """The tensors in what was returned, which leave the program; the rest of it is kept."""
        what = "what loss_fn returned beside the loss" if self.kind.gives_loss else "the result"
        parts = take_apart(result, what, lenient=not self.kind.gives_loss)
        leaves = returned(parts.leaves)
        values = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        shown = self.left.shown(values)
        self.result = parts.form, tuple(leaf_of(leaf, shown.get(i)) for i, leaf in enumerate(leaves))
        self.outputs += [Output("aux" if self.kind.gives_loss else "value", str(i)) for i in values]
        return list(values.values())

    def _guards(self) -> list[torch.Tensor]:
        """The tensors whose values were taken from the example batch; they leave last."""
        if (order := self.selected.order).counts:
            self.reads.rows(torch.stack(order.counts), next(filter(None, order.lines), None))
        guards = {str(i): tensor for i, tensor in enumerate(self.reads.tensors) if tensor is not None}
        self.outputs += [Output("guard", position) for position in guards]
        return list(guards.values())

    def _joined(self, *results: Any) -> Any:
        """What a run gave, with the sides of its coins joined."""
        parts = take_apart(results, lenient=True)
        leaves = returned(parts.leaves)
        joined = self.coins.left([*leaves, *self.left.tensors()])[: len(leaves)]
        for one, leaf in zip(joined, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and stands_for_number(leaf):
                mark_number(one)
        return put_together(parts.form, joined)
