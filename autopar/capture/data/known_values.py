"""Know the tensors of a run: the inputs behind each, whether it was drawn, and what it holds if no input is behind it.

Each tensor has the kinds of input behind it, as bits. The calls behind those without any are kept; the first read of
such a tensor runs them on data, in their order, so that writes in place and views do as they do in the plain model.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from autopar.capture.python.stand_in import stands_for_number
from autopar.capture.refusals.constructs import DATA_LEFT
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.ops.op_facts import form_argument, is_undecided, is_unwritten, moves_of, writes_first
from autopar.torch_compat import FakeTensor, in_transform, on_data, storage_of

Tensor = torch.Tensor
BATCH, BUFFER, CONSTANT, PARAMETER, RANDOM, MEMORY, OTHER, ABSENT = (1 << i for i in range(8))
KINDS = {"batch": BATCH, "buffer": BUFFER, "constant": CONSTANT, "parameter": PARAMETER, "seed": RANDOM, "scale": OTHER}
STEADY = BATCH | BUFFER | CONSTANT  # what a step leaves as it is; ABSENT: and has no data here

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, Enum, np.generic,
          torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip
_ARRAYS = (np.ndarray, np.memmap)
_COPIES = (Tensor.__getitem__, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double)  # of elements, as they are


@dataclass(slots=True)
class _Known:
    """A tensor of the capture. `value`: what it holds, once it was asked for, or what stands behind it."""

    tensor: Tensor  # held, so that its id stays its own
    kinds: int
    version: int
    value: Tensor | None = None
    original: Tensor | None = None  # of the user's, whose copy the value will be
    seed: int | None = None  # of numbers that do for a value
    outside: frozenset[int] = frozenset()  # ids of the user's tensors that its value was computed from
    drawn: int | None = None  # of uniform draws, and its version when they were drawn


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: Any
    kwargs: Any
    results: tuple[Tensor, ...]
    written: tuple[Tensor, ...] = ()  # and what shares their memory
    asked: tuple[Any, Any, Any] | None = None  # the user's own call, where another is made in its place


@dataclass(slots=True)
class Operands:
    """The tensors among the arguments of a call, as they were before it."""

    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kinds: int = 0  # of input behind any of them
    outside: frozenset[int] = frozenset()


class Values:
    """The tensors of one run; `earlier` is the run before it, whose tensors may turn up again."""

    def __init__(self, earlier: Values | None = None) -> None:
        self._known: dict[int, _Known] = dict(earlier._known) if earlier else {}
        self._stored: dict[int, list[_Known]] = {k: list(v) for k, v in earlier._stored.items()} if earlier else {}
        self._calls: list[_Call] = []  # those that were not run on data yet
        self._earlier = earlier
        self.outside: dict[int, Tensor] = dict(earlier.outside) if earlier else {}  # the user's, by their ids
        self.was_read: dict[int, Tensor] = {}  # those whose data decided a value that was read
        self._left: dict[int, Tensor] = {}  # those that lay in memory which was parted since
        self._inputs, self._uses = set[int | None](), set[int]()  # the memory of inputs; what gradients go past, by id

    def given(self, tensor: Tensor, kind: str, original: Tensor | None = None) -> None:
        """An input of the step, which stands for `original`. A plain tensor attribute is known by that, for no step
        may write it."""
        has_data = original is not None and _has_data(original)
        self._inputs.add(storage_of(tensor))
        if kind == "constant" and original is not None and has_data:
            self._outside(tensor, original)
        else:
            self._enter(tensor, KINDS[kind] | (0 if has_data else ABSENT))

    def kept(self, tensor: Tensor, original: Tensor, seed: int) -> None:
        """An input that no step changes, where two runs are compared by values. Where it has no data here (a parameter
        that is split over ranks), any will do that are the same in both."""
        if id(tensor) in self._known:  # as the run before left it
            return
        self._inputs.add(storage_of(tensor))
        known = self._enter(tensor, 0)
        known.original, known.seed = original if _has_data(original) else None, seed

    def operands(self, args: Any, kwargs: Any) -> Operands:
        """What a call is about to be given. Raises CaptureError for a tensor that lay in memory which was parted."""
        operands = Operands()
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                if id(leaf) in self._left:
                    raise refusal(DATA_LEFT, user_frame(sys._getframe(1)))
                operands.tensors.append(leaf)
                operands.versions.append(version_of(leaf))
                known = self._entered(leaf)
                operands.kinds, operands.outside = operands.kinds | known.kinds, operands.outside | known.outside
            elif not isinstance(leaf, _PLAIN) and type(leaf) not in _ARRAYS:
                operands.kinds |= OTHER
        return operands

    def saw(
        self, function: Any, args: Any, kwargs: Any, before: Operands, result: Any,
        asked: tuple[Any, Any, Any] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """A call with what it returned. Returns those of its arguments that it wrote into. asked: the function and the
        arguments of the user's own call, where this one was made in its place."""
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        written, given = _written(function, args, before), {id(tensor) for tensor in before.tensors}
        if not made and not written:
            return written
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in made):
            self._uses.update(map(id, before.tensors))
        chance = MEMORY if is_unwritten(_name(function)) else RANDOM if _is_undecided(function) else 0
        function, args, before = _by_form(function, args, before, lambda args: self.operands(args, kwargs))
        kinds = before.kinds | chance
        if any(type(tensor) is not FakeTensor for tensor in written):  # the user's own, which no run on data may change
            kinds |= OTHER
        if not kinds:
            shared = (known.tensor for tensor in written for known in self._stored.get(storage_of(tensor) or -1, ()))
            copies = None if asked is None else (asked[0], _copied(asked[1]), _copied(asked[2]))
            self._calls.append(_Call(function, _copied(args), _copied(kwargs), tuple(made), tuple(shared), copies))
        for tensor in made:
            known = self._known.get(id(tensor))
            is_constant = known is not None and known.tensor is tensor and known.value is not None  # as it was raised
            if id(tensor) not in given and not is_constant:
                self._enter(tensor, kinds, outside=before.outside)
        for tensor in written:
            self._wrote(tensor, kinds, before.outside)
        return written

    def saw_draws(self, function: Any, args: Any, result: Any, drawn: Iterable[Tensor]) -> None:
        """A call that drew some tensors. A part of a draw is a draw, unless it is rounded."""
        moves = function in _COPIES or moves_of(_name(function)) in ("same", "flat", "turned", "repeated")
        is_part = moves and args and self.is_draw(args[0]) and isinstance(result, Tensor)
        for tensor in (*drawn, *((result,) if is_part and result.dtype == args[0].dtype else ())):
            self._entered(tensor).drawn = version_of(tensor)

    def is_draw(self, tensor: Tensor) -> bool:
        """True for uniform draws that nothing was written into since."""
        known = self._known.get(id(tensor))
        return known is not None and known.drawn == version_of(tensor)

    def is_input(self, tensor: Tensor) -> bool:
        """True for a tensor in the memory of an input of the step."""
        return storage_of(tensor) in self._inputs

    def parts(self, x: Tensor, *others: Tensor) -> None:
        """The memory of `x` is another one from now on, that of one of the others, in place of which a program has a
        copy."""
        alike = (known.tensor for tensor in (x, *others) for known in self._stored.get(storage_of(tensor) or -1, ()))
        self._left.update((id(tensor), tensor) for tensor in alike if tensor is not x)

    def is_used(self, tensor: Tensor) -> bool:
        """True for a tensor that a call was given whose backward pass may look at it again."""
        return id(tensor) in self._uses

    def is_known(self, before: Operands) -> bool:
        """True for a call whose arguments all hang on no input."""
        return bool(before.tensors) and not before.kinds and not in_transform()

    def answer(self, function: Any, args: Any, kwargs: Any, before: Operands) -> Any:
        """What a call gives whose arguments all hang on no input; NotImplemented where data cannot tell."""
        if not self.is_known(before) or not self._run(before.tensors):
            return NotImplemented
        with on_data():
            result = function(*self._on_data(args), **self._on_data(kwargs))
        self.was_read.update((key, self.outside[key]) for key in before.outside)
        return self._taken(result, before.outside)

    def constant(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made of no input, as one of the capture."""
        with on_data():
            value = make()
        made: Tensor = self._taken(value, frozenset())
        return made

    def _taken(self, result: Any, outside: frozenset[int]) -> Any:
        """A result as the model is given it: tensors as constants of the capture."""
        if isinstance(result, Tensor):
            made = result.clone()
            self._enter(made, 0, result, outside)
            return made
        return mapped(lambda item: self._taken(item, outside), _frozen(result))

    def content(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """What a tensor holds that hangs on no input, to be compared; None for another one."""
        value = self._held(tensor)
        if value is None:
            return None
        with on_data():
            data = value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tuple(value.shape), str(value.dtype), hashlib.blake2b(data).digest()

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds that hangs on no input; None for another one."""
        value = self._held(tensor)
        with on_data():
            return None if value is None else value.clone()

    def _held(self, tensor: Tensor) -> Tensor | None:
        known = self._of(tensor)
        if known is None or known.kinds or not self._run([tensor]):
            return None
        with on_data():
            return self._value(tensor)

    def dismiss(self) -> tuple[list[_Known], list[_Call]]:
        """All that is known, which is forgotten here: the tensors, and the calls that were not run on data."""
        known, calls = list(self._known.values()), self._calls
        self._known, self._stored, self._calls, self._earlier = {}, {}, [], None
        return known, calls

    # -- which ones are known -----------------------------------------------------------------------------------

    def _entered(self, tensor: Tensor) -> _Known:
        known = self._of(tensor)
        if known is None and type(tensor) is not FakeTensor and _has_data(tensor):
            return self._outside(tensor, tensor)
        return known or self._enter(tensor, OTHER)

    def _of(self, tensor: Tensor) -> _Known | None:
        known = self._known.get(id(tensor))
        if known is not None and not known.kinds and known.version != version_of(tensor):
            known.kinds |= OTHER  # written where nobody saw it
        return known

    def _enter(
        self, tensor: Tensor, kinds: int, value: Tensor | None = None, outside: frozenset[int] = frozenset()
    ) -> _Known:
        known = self._known[id(tensor)] = _Known(tensor, kinds, version_of(tensor), value, outside=outside)
        storage = storage_of(tensor)
        if storage is None or tensor.is_inference():  # whose writes are not counted
            known.kinds |= OTHER
        if storage is not None:
            self._stored.setdefault(storage, []).append(known)
        return known

    def _outside(self, tensor: Tensor, original: Tensor) -> _Known:
        """A tensor of the user's, which stays as it is while a copy of it is computed with."""
        if stands_for_number(original) or original.requires_grad:
            return self._enter(tensor, OTHER)
        self.outside[id(original)] = original
        known = self._enter(tensor, 0, None, frozenset((id(original),)))
        known.original = original
        return known

    def _wrote(self, tensor: Tensor, kinds: int, outside: frozenset[int]) -> None:
        """A write into a tensor: into all that share its memory."""
        storage = storage_of(tensor)
        own = self._known.get(id(tensor))
        for known in [*self._stored.get(storage, ()), *((own,) if own else ())] if storage is not None else ():
            known.kinds |= kinds | (OTHER if known.kinds & (BUFFER | PARAMETER) else 0)  # another one in the next step
            known.outside |= outside
            known.version, known.drawn = version_of(known.tensor), None

    # -- what they hold -----------------------------------------------------------------------------------------

    def _run(self, wanted: list[Tensor]) -> bool:
        """Run the calls that are due on data; False if what is wanted did not come of it."""
        if self._earlier is not None:
            self._earlier._run([])
        calls, self._calls = self._calls, []
        with on_data():
            for call in calls:
                self._run_one(call)
            return all(self._value(tensor) is not None for tensor in wanted)

    def _run_one(self, call: _Call) -> None:
        state = torch.default_generator.get_state()
        try:
            result = call.function(*self._on_data(call.args), **self._on_data(call.kwargs))
            values = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
            is_steady = torch.equal(state, torch.default_generator.get_state())
        except Exception:
            values, is_steady = [], False
        torch.default_generator.set_state(state)
        is_alike = is_steady and len(values) == len(call.results) and all(map(_alike, values, call.results))
        for position, tensor in enumerate(call.results):
            known = self._known[id(tensor)]
            if is_alike:
                known.value = values[position]
            else:
                known.kinds |= OTHER
        if not is_alike:  # it may have written, or not
            for leaf in leaves((call.args, call.kwargs)):
                if isinstance(leaf, Tensor):
                    self._wrote(leaf, OTHER, frozenset())

    def _value(self, tensor: Tensor) -> Tensor | None:
        known = self._known[id(tensor)]
        if known.value is None and known.original is not None:
            known.value = known.original.detach().clone()
        elif known.value is None and known.seed is not None:
            numbers = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(known.seed), device="cpu") + 0.5
            known.value = numbers.to(tensor.device, tensor.dtype)
        return known.value

    def _on_data(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return mapped(self._on_data, value)
        found = self._value(value)
        if found is None:  # not to be taken for an argument that was left out
            raise LookupError
        return found


def _written(function: Any, args: Any, before: Operands) -> list[Tensor]:
    """What a call wrote into: by torch's own count, which leaves out tensors of inference mode and lists of tensors."""
    pairs = zip(before.tensors, before.versions, strict=True)
    found = {id(tensor): tensor for tensor, old in pairs if version_of(tensor) != old}
    if writes_first(_name(function)):
        found.update((id(leaf), leaf) for leaf in leaves(args[:1]) if isinstance(leaf, Tensor))
    return list(found.values())


def _by_form(
    function: Any, args: Any, before: Operands, operands: Callable[[Any], Operands]
) -> tuple[Any, Any, Operands]:
    """Replace a tensor that a call asks for its shape and dtype alone: the call without that tensor."""
    at = form_argument(_name(function))
    if at is None or len(args) <= at or not isinstance(args[at], Tensor):
        return function, args, before
    like, rest = (args[at].shape, args[at].dtype, args[at].device), (*args[:at], *args[at + 1 :])
    return partial(_of_form, function, at, like), rest, operands(rest)


def _of_form(
    function: Any, at: int, like: tuple[torch.Size, torch.dtype, torch.device], *args: Any, **kwargs: Any
) -> Any:
    shape, dtype, device = like
    return function(*args[:at], torch.empty((), dtype=dtype, device=device).expand(shape), *args[at:], **kwargs)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _is_undecided(function: Any) -> bool:
    """True for a function whose result its arguments do not decide."""
    return is_undecided(_name(function)) or getattr(function, "__module__", "") == "torch.nn.init"


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written, as far as torch counts that."""
    return -1 if tensor.is_inference() else tensor._version


def _has_data(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.device.type != "meta"


def _alike(value: Tensor, fake: Tensor) -> bool:
    return value.shape == fake.shape and value.dtype == fake.dtype


def _frozen(result: Any) -> Any:
    """An array that shares memory with a tensor would let numpy write where no capture sees it."""
    if isinstance(result, np.ndarray):
        result = result.copy()
        result.flags.writeable = False
    return result


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def mapped(function: Any, value: Any) -> Any:
    """A container with other leaves."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return value


def _copied(value: Any) -> Any:
    """The same arguments, which the user's code cannot change any more."""
    return value.copy() if type(value) in _ARRAYS else mapped(_copied, value)
