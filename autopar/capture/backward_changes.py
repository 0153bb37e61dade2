"""What hooks and autograd Functions of the user's change in Python while the backward pass of a trace runs.

A compiled step runs none of that code: the next backward pass must do what this one did. The runs on shapes that are
compared (see `determinism.py`) have no backward pass, so a step that runs code or changes something in it alone is
traced twice more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import CodeType

import torch

from autopar.capture.data.determinism import Steady
from autopar.capture.data.foreign import foreign_state
from autopar.capture.python.attributes import AttributeChange, Attributes
from autopar.capture.python.ran import Ran
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.user_lines import line_that_changes
from autopar.capture.trace.tracer import Traced
from autopar.torch_compat import has_hooks

_ADDED = (
    "a backward hook of {}, which is still there after the step",
    "Each step of the plain module adds one more, and a compiled step none: register it once, outside of the step, or "
    "remove it in the step that registers it. A hook on a value that the step makes ((weight * 1).register_hook) goes "
    "with that value.",
)


class BackwardChanges:
    """What the last backward pass of a trace has changed. before: the attributes of the modules before the step.
    trainable: the parameters of the run that goes on, with their names."""

    def __init__(self, before: Attributes) -> None:
        self.trainable: Sequence[tuple[str, torch.Tensor]] = ()
        self._before = before
        self._attributes = list[AttributeChange]()  # without what they hold, which is of the trace
        self._drawn = list[str]()  # the generators that it moved on
        self._hooked, self._is_hooked = list[str](), False  # what holds hooks of the step's own; if parameters do
        self._code = list[CodeType]()  # of the user's that no other run has run

    @contextmanager
    def watch(self, ran: Ran, runs_code: bool) -> Iterator[None]:
        """Note what changes as long as the context lasts. Buffers leave the program as they are behind it. runs_code:
        of the user's, which is added to what `ran`."""
        forward, drawn, own = self._before.anew(), foreign_state(), Ran()
        with own.watch() if runs_code else nullcontext():
            yield
        self._code += own.own_code_beside(ran)  # of all traces: a step is traced again for what a trace has found
        ran.include(own)
        found = (change for change in forward.changes() if change.kind != "buffer")
        self._attributes = [replace(change, new=None) for change in found]
        self._drawn = [name for name, state in foreign_state().items() if state != drawn[name]]
        self._hooked, self._is_hooked = self._holders(), any(has_hooks(each) for _, each in self.trainable)

    def check(self, steady: Steady, trace: Callable[[bool], Traced]) -> None:
        """Raise CaptureError if the next backward pass would be another one. trace: the step once more; of True, as it
        comes after the last one that was traced."""
        attributes, drawn, hooked = self._attributes, self._drawn, self._hooked
        whole = replace(steady, run=lambda *_, **__: trace(False))
        if drawn:
            raise whole.draws(drawn[0])
        if not attributes and not hooked:
            return self._check_code(whole, partial(trace, False))
        whole.start_anew()
        if not self._is_hooked and _is_same(trace(False), trace(True)):
            return
        if not hooked:
            raise whole.carried(attributes, None, "")
        whole.start_anew()
        line = line_that_changes(lambda: trace(False), self._holders)
        raise refusal(Construct(_ADDED[0].format(hooked[0]), _ADDED[1]), line)

    def _check_code(self, whole: Steady, trace: Callable[[], Traced]) -> None:
        """Raise CaptureError if code that runs in the backward pass alone does something else the next time: by what it
        reads outside of the modules, a clock, or a number that it changes there."""
        if not self._code:
            return
        made, line = list[Traced](), (self._code[0].co_filename, self._code[0].co_firstlineno)
        found = whole.counters(True, lambda: made.append(trace()))
        if not _is_same(made[0], trace()):
            raise found.error(line) if found.unfollowed else whole.unsteady((None, None), line)
        decides = found.deciding(whole.start_anew, lambda: not _is_same(made[0], trace()))
        if decides is not None:
            raise found.error(decides)

    def _holders(self) -> list[str]:
        """What holds hooks that the step has registered."""
        parameters = [f"the gradient of the parameter '{name}'" for name, each in self.trainable if has_hooks(each)]
        return parameters + [f"the module '{path}'" for path in self._before.hooked()]


def _is_same(one: Traced, other: Traced) -> bool:
    """Whether two traces compute the same: the calls, and the constants as far as they have data."""
    if str(one.graph) != str(other.graph):
        return False
    pairs = ((vars(one.root)[name], value) for name, value in vars(other.root).items() if name.startswith("constant"))
    return all(_is_equal(a, b) for a, b in pairs if type(a) is type(b) is torch.Tensor)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same elements; nan is itself."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
