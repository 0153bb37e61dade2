"""The parallel module: what the user trains."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.capture.inputs.partners import inlined
from autopar.capture.step_kind import StepKind
from autopar.compiled import Compiled
from autopar.errors import AutoparError, CaptureError, NotYetError
from autopar.parallel.auto import Auto
from autopar.parallel.gathered import gathered
from autopar.parallel.last_step import LastStep, last_step
from autopar.parallel.programs.programs import Programs
from autopar.parallel.programs.running import Running
from autopar.parallel.session.loss_scale import LossScale
from autopar.parallel.session.random_state import RandomState
from autopar.parallel.session.session import Requested, open_session
from autopar.parallel.stepping import forward_step, loss_step, train_step
from autopar.parallel.tensors.likeness import Likeness
from autopar.parallel.waiting_states import let_states_wait
from autopar.parallel.weights.optimizer_states import States
from autopar.runtime.ranks.recorder import PROFILER, Recorder

_LEFT_OUT = object()  # what a module returned beside its own loss


class ParallelModule(Likeness):
    """A module of which every rank of a mesh holds a part. Made by `autopar.parallelize`.

    Parameters are DTensors under their original names; buffers are whole on every rank. Programs are compiled at the
    first call with a new signature (shapes, dtypes, Python values, training flags), and again where what they read in
    Python has changed (docs/capture.md).

    Submodules are the user's own, and so is all else that this class does not define: attributes, methods, properties,
    special methods (docs/module.md). `original` is the user's module itself, `gathered()` makes it plain for a while.
    """

    def __init__(self, asked: Requested) -> None:
        super().__init__(asked.model)
        self._session = open_session(asked)
        self._auto = Auto(self._session, asked.machine) if asked.is_auto else None
        self._programs, self._store = Programs(self._session), self._session.store
        self._last_aux: Any = None
        self._last: LastStep | None = None
        self._has_stepped = False
        self._become_like(asked.model)
        States(self._store, self._session.agreement, self._session.announcer.updating).watch(self)
        let_states_wait(self._session, self)
        # torch marks the functions of such hooks, which methods do not let it do
        self.register_load_state_dict_pre_hook(partial(self._store.refuse_assign))

    # -- what the user calls ------------------------------------------------------------------------------------

    def forward_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass on the global batch; adds to `.grad` and returns the loss.

        The loss is that of the whole batch, the same on every rank. Raises BatchError if the batch does not fit. With
        precision="fp16" an overflow leaves every `.grad` None (see `loss_scale`), so that an optimizer does nothing.
        What the loss function returned beside the loss is in `last_aux`. Tensors of the batch that require a gradient
        get theirs too, or hand it on to what they were computed from: of this rank's part, where it has one.
        """
        return self._trained("forward_backward", args, kwargs)

    def training_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of the global batch with a `backward()`, for loops and libraries that call it themselves: later, on
        a multiple of the loss, or not at all.

            loss = model.training_loss(x, y) / 4      # instead of loss_fn(model, x, y) / 4
            optimizer.zero_grad()
            loss.backward()                           # adds to .grad, by the gradient that comes back to the loss

        It is `forward_backward` otherwise: both passes are one program, which runs here; the gradients are held until
        `backward()`, on every rank, and are those of the weights of this call. A second `backward()` is refused, and
        one through a gradient (`create_graph=True`): what needs that belongs in the loss function.

        Under `torch.no_grad()` it is the loss of a batch that is not trained on, for validation: a program without a
        backward pass, which leaves no rank with the whole output of the model. It is no step, as a call of the model
        is none.
        """
        return self._trained("training_loss", args, kwargs)

    def _trained(self, call: str, args: Any, kwargs: Any) -> torch.Tensor:
        if inlined(self) is not None:
            raise CaptureError(
                f"{call} of {type(self.original).__name__} is called in the loss function of another model: "
                f"call the model itself there, and {call} after it."
            )
        self._decide(call, args, kwargs)
        is_held, is_whole = call == "training_loss", self._takes_whole(kwargs, of_loss=True)
        kind = StepKind.TRAINING if torch.is_grad_enabled() or not is_held else StepKind.LOSS
        step = partial(train_step, self._session, is_whole, is_held)
        if not kind.trains:
            step = partial(loss_step, self._session, is_whole)
        running, (loss, outputs) = self._programs.run(call, args, kwargs, kind, step)
        if kind.trains:
            self._last, self._has_stepped = None, True
        captured = running.captured
        self._last_aux = captured.result(outputs) if captured.has_result else _LEFT_OUT
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output on the global batch, whole on every rank; with batch="local" this rank's rows of it, and
        all rows with `whole=True`. A backward pass through it is refused.

        In the loss function of another model it is a part of that one's step (docs/several_models.md).
        """
        traced = inlined(self)
        if traced is not None:
            return traced(*args, **kwargs)
        step = partial(forward_step, self._session, self._takes_whole(kwargs, of_loss=False))
        return self._programs.run("forward", args, kwargs, StepKind.OUTPUT, step)[1]

    __call__ = forward  # torch's would run hooks here, which the program does

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile the training step for a batch (on any device, also meta) without running it.

        Parameters take their final layouts. Every rank must call this with batches of the same shapes.
        """
        self._decide("prepare", args, kwargs)
        return Compiled.of(self._programs.prepare("prepare", args, kwargs, StepKind.TRAINING)[0].compiled)

    def record(self, recorder: Recorder | Literal["torch.profiler"] | None) -> None:
        """Let a recorder see what this rank does in the steps that are compiled by now, or torch.profiler, by the names
        of modules, collectives and passes; None ends it."""
        if isinstance(recorder, str) and recorder != PROFILER:
            raise AutoparError(f"record('{recorder}'): give a Recorder, '{PROFILER}' or None.")
        for running in self._programs.all:
            running.runner.record(recorder)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors under the original names on rank 0; empty on the other ranks. Every rank must call it."""
        self._announce("full_state_dict")
        return self._store.whole_state()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole CPU gradients by parameter name on rank 0; empty on the others. Every rank must call it."""
        self._announce("full_gradients", self._store.with_gradients(), what="parameters that have gradients")
        return self._store.whole_gradients()

    def gathered(self, *, rank: int | None = None, write: bool = False) -> AbstractContextManager[Any]:
        """The plain module, for as long as a `with` block lasts: whole tensors in the place of parameters and buffers,
        for whatever it can do on one device. Every rank must enter, and leave.

            with model.gathered() as plain:            # on every rank
                tokens = plain.generate(prompt)
            with model.gathered(rank=0) as plain:      # None on the others, whose memory stays as it is
                if plain is not None:
                    plain.save_pretrained(folder)

        It is `original`, with its own class and attributes. Meanwhile the parallel model refuses to be called.
        write: behind the block, take over what one rank (`rank`, or 0) has in parameters and buffers then; an error in
        the block leaves all as it was. Without it changes are lost, which a note says. Gradients stay where they are.
        """
        return gathered(self._session, rank, write)

    def check_replicas(self) -> None:
        """Raise RankError on every rank if ranks hold other values of what should be the same: parameters that an axis
        does not split, and buffers. Every rank must call it; `forward_backward` does, at every N-th step."""
        self._announce("check_replicas")
        self._session.replicas.check(self._session.random.steps)

    @property
    def last_aux(self) -> Any:
        """What the loss function returned beside the loss in its last call here, in its own container.

        Tensors are detached, and as on one device those of the whole batch, on every rank; with batch="local" this
        rank's rows of them, and all with `forward_backward(..., whole=True)`. Of `(loss, x)` this is x,
        of `(loss, x, y)` a tuple (x, y); an object or a mapping that has the loss in it comes as it is. Without a loss
        function nothing but the loss leaves a step: then this raises AutoparError.
        """
        if self._last_aux is _LEFT_OUT:
            raise AutoparError(
                f"{type(self.original).__name__} returns its own loss; what else it returns is left out of the step: "
                f"its logits, whole on every rank, could cost more than its gradients. Say what you want to read: "
                f"parallelize(..., loss_fn=...) with a function that returns it beside the loss, such as "
                f"`out = model(**batch); return out.loss, out.logits.argmax(-1)`."
            )
        return self._last_aux

    def __getattr__(self, name: str) -> Any:
        if name != "last" or "_session" not in self.__dict__ or hasattr(self.original, name):
            return super().__getattr__(name)  # many a module has a layer of this name
        return self._last_step()

    def _last_step(self) -> LastStep:
        """`model.last`: how many rows each expert took in the last `forward_backward`, over all ranks, where an axis
        splits experts. Every rank must read it: one exchange for each step whose figures are read, and none for others.
        """
        running = self._programs.last_trained
        if running is None or not self._has_stepped:  # `prepare` makes a program and takes no step
            raise NotYetError("last is of a step, and no step was taken yet: call forward_backward first.")
        if self._last is None:
            self._announce("last")
            self._last = last_step(running, self._session)
        return self._last

    @property
    def random_state(self) -> RandomState:
        """The seed, the steps taken and the calls of the model itself: save it with a checkpoint, load it to go on with
        the draws that follow."""
        return self._session.random

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss of precision="fp16", which follows overflows: save it with a checkpoint. Else None."""
        return self._session.scale

    @property
    def compiled(self) -> Compiled | None:
        """The training program used last."""
        running = self._programs.last_trained
        return Compiled.of(running.compiled) if running else None

    @property
    def programs(self) -> tuple[Running, ...]:
        """What is compiled by now, the last used last."""
        return tuple(self._programs.all)

    @property
    def generated_code(self) -> str | None:
        """The Python that runs this rank's part of the training program used last, of our executor or of Inductor."""
        running = self._programs.last_trained
        return running.runner.source if running else None

    def extra_repr(self) -> str:
        return f"mesh={self._store.distributor.mesh}, rank={dist.get_rank()}"

    def _announce(self, call: str, lines: Sequence[str] = (), what: str = "arguments") -> None:
        """Tell all ranks of a call, which a model that is gathered refuses."""
        fault = self._store.structure.meanwhile
        self._session.announcer.call(call, [*lines, fault] if fault else lines, what)
        if fault:
            raise AutoparError(fault)

    def _takes_whole(self, kwargs: dict[str, Any], of_loss: bool) -> bool:
        """Take `whole=True` out of a call's arguments, unless the user's own function has a parameter of that name."""
        own = self._session.settings.loss_fn if of_loss else None
        if "whole" not in kwargs or "whole" in inspect.signature(own or self.original.forward).parameters:
            return False
        return bool(kwargs.pop("whole"))

    def _decide(self, call: str, args: Any, kwargs: Any) -> None:
        """With mesh="auto": take the plan of the first training batch."""
        if self._auto is not None:
            self._session = self._auto.decided(call, args, kwargs)
            self._programs, self._auto = Programs(self._session), None
            let_states_wait(self._session, self)
