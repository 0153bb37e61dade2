"""One differentiating trace of a training step: forward, loss and backward, on fake tensors."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.captured import Captured
from autopar.capture.data.determinism import Steady
from autopar.capture.data.foreign import foreign_state
from autopar.capture.data.item_values import check_returned
from autopar.capture.data.reads import Reads, Unknown, fake_like, known_inputs
from autopar.capture.data.recorded_calls import CHANGING, RecordedCalls, behind_of
from autopar.capture.forks import Forks, captured
from autopar.capture.inputs import tables
from autopar.capture.inputs.containers import Form, check_detached, put_together, take_apart, take_call_apart
from autopar.capture.inputs.loss_outputs import LossFn, check_loss, has_own_backward, loss_of, split_result
from autopar.capture.inputs.module_state import attributes, device_of, fakes_of, once_each, state_of, unmoved
from autopar.capture.inputs.outside import Outside, outside_fault
from autopar.capture.inputs.partners import Partner, Partners, UnknownPartner
from autopar.capture.leftovers import Leftovers, settled
from autopar.capture.ops.decompositions import decompositions
from autopar.capture.python.attributes import Attributes
from autopar.capture.python.ran import Ran
from autopar.capture.raising import Raise, default_dtype, idle_autocast
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import explain, refusal
from autopar.capture.refusals.location import Locator
from autopar.capture.refusals.user_lines import line_that_changes
from autopar.capture.resizing.earlier import Earlier
from autopar.capture.resizing.resizing import Resizing
from autopar.capture.trace.normalise import functional, normalise, without_seed
from autopar.capture.trace.results import Results
from autopar.capture.trace.tracer import Traced, Tracer, Unseen
from autopar.capture.trace.writes import check_collectives, check_writes
from autopar.errors import AutoparError
from autopar.ir.program import PARTNER, Input, Output, Program
from autopar.torch_compat import FakeTensorMode, backward, gradients, quiet

# A training step as one module call, whose whole state is swapped for a trace.


class Step(nn.Module):
    """Spans forward and backward in one call, so that a functional call swaps the state for both."""

    def __init__(
        self, model: nn.Module, partners: Iterable[Partner], body: Callable[..., Any], replaced: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        for partner in partners:
            self.add_module(partner.name, partner.traced)
        self.body = body
        self.replaced = replaced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(tables.named_parameters(self, remove_duplicate=False))
        result = self.body(*args, **kwargs)
        for name, tensor in tables.named_parameters(self, remove_duplicate=False):
            if given.get(name, tensor) is not tensor:
                self.replaced[name] = tensor
        return result


# Check what a step leaves in the buffers of a module.


def check_buffers(
    old: Mapping[str, torch.Tensor], new: Iterable[tuple[str, torch.Tensor]], run: Callable[[], object],
    find: Callable[[str], torch.Tensor],
) -> None:  # fmt: skip
    """Raise CaptureError for a buffer that a program cannot leave behind. run: makes another run, so that the line is
    found that does it. find: a buffer as it is by then."""
    for name, tensor in new:
        fault = buffer_fault(name, old[name], tensor)
        if fault is not None:
            raise refusal(fault, line_that_changes(run, lambda name=name: form_of(find(name))))  # type: ignore[misc]


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a buffer must keep."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def buffer_fault(name: str, old: torch.Tensor, new: torch.Tensor) -> Construct | None:
    """What is wrong with the new value of a buffer."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
        return Construct(
            f"a buffer '{name}' of another form ({was} before the step, {now} after it)",
            "A program is compiled for one form: make the buffer of its full size in __init__ and write into a part of "
            "it, or pass it in with the batch.",
        )
    if new.grad_fn is not None and not old.requires_grad:  # a leaf is but marked, and holds what it held
        return Construct(
            f"a buffer '{name}' whose new value has a gradient",
            "Its graph is gone in the next step: write x.detach() into it, under torch.no_grad().",
        )
    return None


__all__ = ["Captured", "LossFn", "capture", "fake_like", "loss_of", "state_of"]


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool = True,
    lift: torch.dtype | None = None,
    specialize: bool = False,
    precision: str | None = None,
    earlier: Earlier | None = None,
) -> Captured:
    """Trace one step of `model` on a batch (tensors and arrays in any containers; their values are not read).

    With `train`, the program returns the loss, the gradient of every parameter that has one, and the new buffers;
    otherwise the model's output, without gradients. `loss_fn(model, *args, **kwargs)` gives the loss; None if the
    module itself does. `lift`: the dtype that the model's own floating-point casts go to, if not their own.
    `specialize`: values that the model reads from tensors are taken from the batch, which then needs data.
    `precision`: with a short float the model's own casts stay in the program even where they change nothing yet, and
    with "fp16" the gradients are those of the loss times an input of kind "scale". `earlier`: captures of the same step
    at other sizes, which may tell its program. Raises CaptureError with the user's line where it cannot be captured.
    """

    left, answers = Leftovers(), () if earlier is None else earlier.answers

    def run(reads: Reads, forks: Forks) -> Captured:
        others = None if specialize or forks.sides is not None else earlier
        made = _Capture(model, loss_fn, args, dict(kwargs), train, lift, reads, precision, forks, others)
        try:
            return made.run()
        finally:
            left.dismiss([calls.values for calls in made.runs], made.graphs)

    return settled(partial(captured, run, specialize, answers), left, lift)


Trainable = list[tuple[str, torch.Tensor]]  # parameters with their names


class _Capture:
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool,
        lift: torch.dtype | None, reads: Reads, precision: str | None, forks: Forks,
        earlier: Earlier | None,
    ) -> None:  # fmt: skip
        self.graphs, self.runs = list[fx.Graph](), list[RecordedCalls]()  # all of the capture's
        self.forks, self.resizing = forks, Resizing(earlier)
        self.model, self.loss_fn, self.train, self.lift, self.reads = model, loss_fn, train, lift, reads
        self.keeps_casts, self.is_scaled = precision in ("bf16", "fp16"), precision == "fp16" and train
        self.scale: torch.Tensor | None = None
        self.selects = (False, False)  # rows, by a mask; and they could be taken by their number
        self.unknown: Unknown | UnknownPartner | None = None
        self.partners = Partners(model, loss_fn)
        self.parts = take_call_apart(args, kwargs)
        self.leaves = self.parts.leaves
        if train:
            check_detached(self.parts)
        self.state = state_of(model)
        self.locator = Locator()
        self.fake, self.device = FakeTensorMode(allow_non_fake_inputs=True), device_of(model)
        self.outputs: list[Output] = []
        self.has_random_ops = self.has_items = False
        self.result: tuple[Form | None, tuple[Any, ...]] = (None, ())
        self.calls, self.calling, self.ran = RecordedCalls(), None, Ran()
        self.may_specialize = False
        self.given: list[tuple[torch.Tensor, int]] = []  # the inputs as the model got them, with their versions
        self.replaced: dict[str, Any] = {}
        self.notes: list[str] = []
        self.untrained: dict[int, str] = {}  # names of plain attributes that require a gradient
        self.outside: Mapping[int, Outside] = {}
        self.fault: AutoparError | None = None
        self.new_buffers: list[tuple[str, torch.Tensor]] = []

    def run(self) -> Captured:
        before, drawn = Attributes(self.model), foreign_state()
        try:
            autocast = idle_autocast(self.device.type) if self.keeps_casts else nullcontext()
            with quiet(), default_dtype(self.lift), autocast:
                self.resizing.begin(self.model, self.loss_fn if self.train else None)
                traced, inputs, fakes = self._whole_trace(before)
                is_plain = self._is_plain(before, drawn)
                self._check_buffers(fakes)
                if self.resizing.foreseen is not None:
                    known = self.resizing.program(self.notes) if is_plain else None
                    if known is not None and (known[2] or not self._steady(fakes, before, drawn)):
                        self.ran.is_whole = True
                        return self._captured(*known[:2])
                    before.restore()
                    self.resizing, self.ran = Resizing(self.resizing.earlier), Ran()
                    traced, inputs, fakes = self._whole_trace(before)
                    is_plain = is_plain and self._is_plain(before, drawn)
                told = self.notes
                check_collectives(traced, self.locator)
                notes = told + check_writes(traced, inputs, self.locator)
                notes += self._steady(fakes, before, drawn)
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
        except Exception as error:
            raise explain(error, self.calling, self.locator, self.may_specialize) from error
        finally:
            before.restore()
        self.graphs.append(traced.graph)
        program, constants = normalise(traced, tuple(inputs), tuple(self.outputs), self.keeps_casts)
        if not self.has_random_ops:
            program = without_seed(program)
        program = program.with_(notes=(*notes, *(read.note for read in self.reads.known)))
        if is_plain:
            self.resizing.keep(program, constants, told, self.ran)
        return self._captured(program, constants)

    def _captured(self, program: Program, constants: Mapping[str, torch.Tensor]) -> Captured:
        """What was captured. constants: those that are not the model's own."""
        entries = self.state.entries
        kept = {entry.name: tensor for entry, tensor in entries if entry.kind == "constant"}
        frozen = frozenset(
            entry.name for entry, tensor in entries if entry.kind == "parameter" and not tensor.requires_grad
        )
        reads, partners = tuple(self.reads.known), tuple(self.partners.known.values())
        return Captured(program, {**kept, **constants}, *self.result, reads, frozen, partners, self.ran)

    def _steady(self, fakes: list[torch.Tensor], before: Attributes, drawn: Mapping[str, Any]) -> list[str]:
        """Notes of a second run; see `Steady.check`."""
        run, names = partial(self._again, fakes), frozenset(n for entry, _ in self.state.entries for n in entry.names)
        return Steady(self._submodule, run, self.calls, before, self.replaced, drawn, names, *self.selects).check()

    def _is_plain(self, before: Attributes, drawn: Mapping[str, Any]) -> bool:
        """True if the graph of the step is all that there is to say of it; see `earlier.py`."""
        is_other = self.partners.known or self.forks.lines or self.reads.known or any(self.selects)
        is_other = is_other or self.calls.drawn or self.has_items
        return not (is_other or self.replaced or before.changes()) and foreign_state() == drawn

    def _whole_trace(self, before: Attributes) -> tuple[Traced, list[Input], list[torch.Tensor]]:
        """The trace of the step with its inputs: begun again after each partner and each read that it meets first."""
        while True:
            given = self._given()
            fakes = fakes_of(given, self.fake, self.device)
            traced = self._trace(fakes)
            if isinstance(self.unknown, UnknownPartner):
                partner = self.partners.add(self.unknown)
                before.restore()
                if partner is not None:
                    before.add(partner.traced, partner.name)
                self.state = state_of(self.model, {p.name: p.traced for p in self.partners.known.values()})
            elif self.unknown is not None:
                traced = functional(traced, fakes, self.fake)
                self.reads.learn(self.unknown, *known_inputs(traced, self.unknown, given, self.device))
                before.restore()
            else:
                return traced, [entry for entry, _ in given], fakes

    def _given(self) -> list[tuple[Input, torch.Tensor | None]]:
        """What the step takes."""
        given: list[tuple[Input, torch.Tensor | None]] = list(self.state.entries)
        given += [(Input("batch", (str(i),)), tensor) for i, tensor in self.parts.tensors()]
        given += [(Input("scale", ("loss_scale",)), None)] * self.is_scaled
        return [*given, (Input("seed", ("seed",)), None)]

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All that may run, by path."""
        yield from tables.named_modules(self.model)
        for partner in self.partners.known.values():
            yield from tables.named_modules(partner.traced, prefix=partner.name)

    def _submodule(self, path: str) -> nn.Module:
        return dict(self._modules())[path]

    def _trace(self, fakes: list[torch.Tensor]) -> Traced:
        """The whole step, or all of it before what is not known yet (`self.unknown`)."""
        self.calls, self.replaced, self.unknown = RecordedCalls(), {}, None
        self.tracer = Tracer(fakes, decompositions(), Results(self.fake))
        self.runs.append(self.calls)
        self.graphs.append(self.tracer.graph)
        with self.locator.follow(self._modules()):
            return self.tracer.trace(self._traced, fakes, self.fake)

    def _traced(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        mode = Raise(self.locator, inputs[-1], self.lift, self.calls, self.reads, self.keeps_casts, self.partners)
        self.outside = mode.outside
        mode.forks, mode.ran, mode.selected.tracer = self.forks, self.ran, self.tracer
        self._start()
        body = self._train_body if self.train else self._forward_body
        try:
            with self.resizing.watching(self.ran):
                result = self._run(inputs, mode, body, self.replaced, {})
        except (Unknown, UnknownPartner) as found:
            self.unknown = found
            return (found.tensor if isinstance(found, Unknown) else inputs[-1],)
        finally:
            self.calling, self.may_specialize = mode.calling, mode.may_specialize and not self.reads.is_allowed
            self.notes = mode.told()
            self.ran.values = mode.values
        self.has_random_ops, self.has_items = bool(mode.random_ops), bool(mode.items.found)
        mode.items.close()
        mode.selected.check_leaving(result)
        self.selects = bool(mode.selected.known), mode.selected.may_specialize
        return tuple(result)

    def _start(self) -> None:
        """A run begins."""
        self.forks.start()
        self.reads.start()

    def _again(self, inputs: list[torch.Tensor], calls: RecordedCalls, is_watched: bool = True) -> None:
        """Forward and loss once more, on shapes alone; what the model prints is printed already. is_watched: no line is
        looked for meanwhile, which another trace function does."""
        self._start()
        self.runs.append(calls)
        with self.fake, Unseen(Results(self.fake)), redirect_stdout(io.StringIO()):
            mode = Raise(Locator(), inputs[-1], self.lift, calls, self.reads, self.keeps_casts, self.partners, False)
            mode.forks, mode.ran = self.forks, self.ran
            with self.ran.watch() if is_watched else nullcontext():
                self._run(inputs, mode, lambda _: self._result, self.replaced, dict(self.replaced))
            self.ran.is_whole |= is_watched

    def _check_buffers(self, inputs: list[torch.Tensor]) -> None:
        old = {entry.name: tensor for (entry, _), tensor in zip(self.state.entries, inputs, strict=False)}
        check_buffers(
            old, self.new_buffers, lambda: self._again(inputs, RecordedCalls(), is_watched=False), self._buffer
        )

    def _buffer(self, name: str) -> torch.Tensor:
        path, _, attribute = name.rpartition(".")
        return tables.buffer(self._submodule(path), attribute)

    def _run(
        self, inputs: Sequence[torch.Tensor], mode: Raise, body: Callable[[Trainable], Callable[..., Any]],
        replaced: dict[str, Any], carried: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """What `body` gives for the model on these inputs, with the plain attributes that an earlier run left."""
        swapped: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        trainable: Trainable = []
        values, behind = list(inputs), list[int]()  # as the model is given them
        calls = mode.calls
        position = 0
        for (entry, tensor), given in zip(self.state.entries, inputs, strict=False):
            value = given
            if entry.kind == "parameter" and tensor.requires_grad and self.train:
                value = given.detach().requires_grad_()
                trainable.append((entry.name, value))
            elif entry.kind == "constant" and tensor.requires_grad and self.train:
                value = given.detach().requires_grad_()
                self.untrained[id(value)] = entry.name
            bit = behind_of(position, entry, tensor)
            behind.append(bit)
            if not calls.keep(bit, value, tensor, position):
                calls.values.given(value, entry.kind, tensor)
            for name in entry.names:
                path = name if name.startswith(PARTNER) else f"model.{name}"
                (constants if entry.kind == "constant" else swapped)[path] = value
            values[position] = value
            if entry.kind == "parameter":
                mode.inputs[id(tensor)] = value
            position += 1
        leaves = list(self.leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = inputs[position]
                calls.values.given(inputs[position], "batch", leaf)
                position += 1
        for extra in inputs[position:]:
            calls.values.given(extra, "seed")
        self.scale = inputs[position] if self.is_scaled else None
        calls.given(values, [*behind, *[CHANGING] * (len(values) - len(behind))])
        self.given = [(value, value._version) for value in values]
        constants.update(carried)
        mode.sample_counts = tuple({tensor.shape[0]: None for _, tensor in self.parts.tensors() if tensor.ndim})
        args, kwargs = put_together(self.parts.form, leaves)
        step = Step(self.model, self.partners.known.values(), body(trainable), replaced)
        state = attributes(step, constants, replaced), unmoved(tables.modules(step))
        with mode, state[0], state[1], nullcontext() if self.train else torch.no_grad():
            return tables.functional_call(step, once_each(step, swapped), args, kwargs)

    def _result(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None or not self.train:
            return self.model(*args, **kwargs)
        return self.loss_fn(self.model, *args, **kwargs)

    def _train_body(self, trainable: Trainable) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            with self.partners.watch():
                loss, aux = split_result(self._result(*args, **kwargs), self.loss_fn)
            check_returned((loss,))
            check_loss(loss, self.loss_fn, bool(trainable))
            self.fault = outside_fault(loss, {id(tensor) for _, tensor in trainable}, self.untrained, self.outside)
            buffers = self._buffers()
            self.outputs = [Output("loss", "loss")]
            self.outputs += [Output("gradient", name) for name, _ in trainable]
            self.outputs += [Output("buffer", name) for name, _ in buffers]
            # A module's own loss comes with logits that few read: who does says so with a loss function.
            is_left_out = self.loss_fn is None and aux is not None
            values = [] if is_left_out else self._values(aux)
            if self.fault is None and self._ends([loss, *(tensor for _, tensor in buffers), *values], trainable):
                return []
            self.locator.phase, self.tracer.is_unseen = "backward", True  # torch's own ops: none of the user's casts
            scaled = loss if self.scale is None else loss * self.scale
            tensors = [tensor for _, tensor in trainable]
            if has_own_backward(loss):
                backward(scaled)
                grads = tuple(tensor.grad for tensor in tensors)
            else:
                grads = gradients(scaled, tensors)
            values = [value.detach() for value in values]
            return [loss.detach(), *grads, *(tensor for _, tensor in buffers), *values, *self._guards()]

        return body

    def _forward_body(self, _: Trainable) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            with self.partners.watch():
                result = self._result(*args, **kwargs)
            self.outputs = []
            values = self._values(result)
            buffers = self._buffers()
            self.outputs += [Output("buffer", name) for name, _ in buffers]
            if self._ends([*values, *(tensor for _, tensor in buffers)]):
                return []
            return [*values, *(tensor for _, tensor in buffers), *self._guards()]

        return body

    def _ends(self, results: Sequence[torch.Tensor], trainable: Trainable | None = None) -> bool:
        """True if the program is known at the end of the forward pass."""
        batch, names = [tensor for _, tensor in self.parts.tensors()], {id(tensor): n for n, tensor in trainable or ()}
        known = tuple(entry for entry, _ in self.state.entries), tuple(self.outputs), tuple(names.values())
        loss = None if trainable is None else results[0]
        is_known = self.resizing.ends(self.tracer, batch, results, loss, names, known)
        self.ran = Ran() if self.resizing.earlier is not None and not is_known else self.ran
        return is_known

    def _values(self, result: Any) -> list[torch.Tensor]:
        """The tensors in what was returned, which leave the program; the rest of it is kept."""
        what = "what loss_fn returned beside the loss" if self.train else "the result"
        parts = take_apart(result, what, lenient=not self.train)
        check_returned(parts.leaves)
        values = list(parts.tensors())
        self.result = (parts.form, tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in parts.leaves))
        self.outputs += [Output("aux" if self.train else "value", str(i)) for i, _ in values]
        return [tensor for _, tensor in values]

    def _guards(self) -> list[torch.Tensor]:
        """The tensors whose values were taken from the example batch; they leave last."""
        guards = {str(i): tensor for i, tensor in enumerate(self.reads.tensors) if tensor is not None}
        self.outputs += [Output("guard", position) for position in guards]
        return list(guards.values())

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        known = {entry.name for entry, _ in self.state.entries if entry.kind == "buffer"}
        named_buffers = dict(tables.named_buffers(self.model))
        for partner in self.partners.known.values():
            named_buffers.update(tables.named_buffers(partner.traced, prefix=partner.name))
        self.new_buffers = [(name, tensor) for name, tensor in named_buffers.items() if name in known]
        for position, ((entry, tensor), (given, version)) in enumerate(
            zip(self.state.entries, self.given, strict=False)
        ):
            is_replaced = entry.kind == "buffer" and named_buffers.get(entry.name) is not given
            if is_replaced or (entry.kind == "buffer" and given._version != version):
                self.calls.wrote(behind_of(position, entry, tensor), is_replaced)
        return self.new_buffers
