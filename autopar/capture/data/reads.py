"""Values that a model reads from its tensors, taken from the example batch if the user wants it so (`specialize=True`).

A read ends the trace; what was traced so far computes the value, and the next trace goes on with it. The tensor leaves
the program beside its results, so that each step is checked to have the same value.

Facts are read in the same way and need no permission: whether something holds that lets more be split. Where it does
not, the program is right for any batch, and nothing is checked.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.data.so_far import STEADY, SoFar, is_steady
from autopar.capture.ops.canonical import filled
from autopar.capture.python.left_values import LeftValue
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal, wants_data
from autopar.capture.refusals.location import Line
from autopar.capture.trace.tracer import Traced
from autopar.errors import AutoparError, BatchError, CaptureError
from autopar.ir.program import Input

Tensor = torch.Tensor
Value = bool | int | float | complex | tuple[int, ...]

READERS: Mapping[Any, tuple[str, Callable[[Tensor], Value]]] = {
    Tensor.__bool__: ("bool() of a tensor", bool),
    Tensor.__int__: ("int() of a tensor", int),
    Tensor.__index__: ("int() of a tensor", int),
    Tensor.__float__: ("float() of a tensor", float),
    Tensor.item: (".item() of a tensor", Tensor.item),
}
COUNT = "count"  # of what a function gives, in place of a function that reads
ROWS = "rows"  # how many each mask selects: of any number the program is right
PLACES = "places"  # of a mask, which a loop goes through
OWN_ROWS, FULL_LENGTH = "own rows", "full length"  # likewise: facts
ANY_ROWS = "any rows"  # likewise: whether a mask selects any


def not_steady(kind: str, name: str, function: Any) -> Construct:
    """A read that nothing is known of: what it depends on changes with each step, or has no data."""
    read = "a size that is read" if function is COUNT else "a value that is read"
    if kind in STEADY:
        return Construct(
            f"{read} from a tensor, and {kind} tensor '{name}', on which it depends, has no data",
            "Give an example batch on a real device with specialize=True.",
        )
    what = "random numbers" if kind == "seed" else f"parameter '{name}'"
    instead = "Keep it a tensor: compute both sides and choose by element with torch.where(condition, a, b)."
    if function is COUNT:
        instead = (
            "Keep all rows, and leave those out that do not count: torch.where(mask, rows, x) in place of "
            "x[mask] = rows, (x * mask).sum() / mask.sum() in place of x[mask].mean()."
        )
    return Construct(f"{read} from a tensor and depends on {what}: each step has another", instead)


class AnyRows(int):
    """What is read of a mask, told from other values: a program with one such read guards all masks."""

    def __str__(self) -> str:
        return str(bool(self))


_OTHERS: Mapping[Any, tuple[str, Callable[[Tensor], Value]]] = {
    ROWS: ("how many rows masks select", lambda counts: tuple(counts.tolist())),
    PLACES: ("the places of a mask, gone through", lambda mask: tuple(mask.nonzero().flatten().tolist())),
    ANY_ROWS: ("whether a mask selects rows", lambda tensor: AnyRows(bool(tensor))),
    COUNT: ("the size of what this gives", int),
    OWN_ROWS: ("equal numbers of rows for all samples", bool),
    FULL_LENGTH: ("a sequence as long as the padded batch", bool),
}


def _reader(function: Any) -> tuple[str, Callable[[Tensor], Value]]:
    return _OTHERS[function] if function in _OTHERS else READERS[function]


@dataclass(frozen=True, slots=True)
class Read:
    """One value that was read: by which function, where, and what it is for the example batch. is_guess: no data said
    so; the first step that finds another value takes another program."""

    function: Any
    line: Line | None
    value: Value
    is_guess: bool = False
    is_guard: bool = False  # the truth of a tensor, for which nobody has to ask

    def __str__(self) -> str:
        where = f"{self.line[0]}:{self.line[1]}" if self.line else "an unknown line"
        return f"{_reader(self.function)[0]} at {where}"

    @property
    def is_checked(self) -> bool:
        """False for a fact that does not hold: the program is right where it does, too."""
        return not self.is_fact or bool(self.value)

    @property
    def has_other(self) -> bool:
        """True where a guess leaves one other value."""
        return self.is_guess and self.function not in (PLACES, ANY_ROWS)

    @property
    def is_fact(self) -> bool:
        return self.function in (OWN_ROWS, FULL_LENGTH)

    @property
    def note(self) -> str:
        if self.function is ROWS:
            return (
                f"{self} is read at each step: where one selects none the model leaves calls out, and parameters of "
                f"which no other is made have no gradient, as on one device. On a GPU that waits for the device; a "
                f"loop that makes the calls for no rows, too, does not"
            )
        if self.is_guard:
            return (
                f"{self} is taken as {self.value}; each step checks that it is before anything is changed, and takes "
                f"another program where it is not. On a GPU that waits for the device"
            )
        if self.function is FULL_LENGTH and not self.value:
            return f"{self} is not in the example batch"
        if not self.is_checked:
            return (
                f"{self} are not what this batch has: every rank takes the rows of all, and micro-batches are refused. "
                "Pad samples to as many rows, and places for them, as the others have"
            )
        if self.function is OWN_ROWS:
            return f"{self} are taken for granted: its rows are each sample's own; each step checks it"
        if self.function is FULL_LENGTH:
            return f"{self} is taken for granted; each step checks that there is one"
        return f"{self} is taken as {self.value}, as in the example batch; each step checks that it is"

    def now(self, tensor: Tensor) -> Value:
        """The value in this step."""
        return _reader(self.function)[1](tensor)

    def is_(self, value: Value) -> bool:
        """True for the value that the program was compiled for."""
        return self.function is ROWS or value == self.value or (value != value and self.value != self.value)

    def check(self, tensor: Tensor) -> None:
        """Raise BatchError if the value is another one in this step."""
        now = self.now(tensor)
        if not self.is_(now):
            raise self.refused(now)

    def refused(self, now: Value, why: str = "") -> BatchError:
        """What is said of a batch with another value; why: no program is compiled for it."""
        origin = "" if self.is_guard or self.is_fact else ", as in the example (specialize=True)"
        return BatchError(
            f"{self} is {now} for this batch, but the program was compiled for {self.value}{origin}.{why} "
            f"Nothing was changed by this step. Give batches that agree in it, or keep it a tensor: compute both sides "
            f"and choose with torch.where."
        )


class Unknown(BaseException):
    """Ends a trace at a read whose value is not known yet. No error: a user's `except Exception` must not stop it."""

    def __init__(self, function: Any, tensor: Tensor, line: Line | None) -> None:
        super().__init__()
        self.function, self.tensor, self.line = function, tensor, line


class OtherValues(Exception):
    """A step whose batch has other values than its program was compiled for. values: those of its reads, in order, up
    to the first that differs, which is `read`."""

    def __init__(self, read: Read, values: tuple[Value, ...]) -> None:
        super().__init__(str(read))
        self.read, self.values = read, values

    def raised(self, error: CaptureError) -> Exception:
        """What a step raises whose way the model does not go to its end: the model's own error, if it raises one."""
        own = error.__cause__
        if not isinstance(own, Exception) or isinstance(own, AutoparError) or wants_data(own):
            return self.read.refused(self.values[-1], f" This way cannot be compiled: {error}\n")
        own = own.with_traceback(None)
        own.add_note(f"{self.read} is {self.values[-1]} for this batch. Nothing was changed by this step.")
        return own


def check_reads(reads: Sequence[Read], tensors: Sequence[Tensor]) -> None:
    """Raise OtherValues where this step's tensors have other values. What was read after the first of them was read on
    a way that the model does not go."""
    values: list[Value] = []
    now = iter(tensors)
    for read in reads:
        values.append(read.now(next(now)) if read.is_checked else read.value)
        if not read.is_(values[-1]):
            raise OtherValues(read, tuple(values))


@dataclass(frozen=True, slots=True)
class Answers:
    """What is known of the step that a program is made for: its seed and its number, which decide random branches, and
    what the first of its reads give. asks: it may ask for facts of the data, too. left: what other programs of the
    model would leave in Python, on which it may not hang."""

    seed: tuple[int, int] = (0, 0)
    values: tuple[Value, ...] = ()
    asks: bool = True
    left: tuple[LeftValue, ...] = ()


_MOST = 256  # values of one step
_REPEATED = 60  # guesses on one line that are alike
_ROUNDS = 16  # of a `while` on data, in the first program
_LOOP = re.compile(r"while\b\s*(not\b)?")
_TOO_MANY = Construct(
    f"a branch on data behind {_MOST} others of the same step",
    "Each is checked at every step. Run a fixed number of rounds and keep the value where it is done: "
    "x = torch.where(done, x, step(x)).",
)


@dataclass(slots=True)
class Branches:
    """What the run that is captured found of branches by a number of rows, and others go by. zero: by line, True for
    one that is taken where there are none. masks: the lines of those whose rows they are. joined: the lines where what
    was cut is put together again; copied: where rows are, which lie otherwise. numbers: by line, below which those
    are that a tensor has. is_off: they are branches on data like any others: a capture that took them so failed."""

    zero: dict[Line | None, bool] = field(default_factory=dict)
    masks: set[Line | None] = field(default_factory=set)
    joined: set[Line | None] = field(default_factory=set)
    copied: set[Line | None] = field(default_factory=set)
    numbers: dict[Line | None, int] = field(default_factory=dict)
    is_off: bool = False


@dataclass(slots=True)
class Reads:
    """The reads of a model in their order. `tensors`: those of the run that goes on, as far as it has come; None for
    what is not checked.

    sized: lines that select rows by a mask, whose number is read; `selected` are those where it could be.
    is_permitted: values of what steps leave as it is may be taken from the example batch. guards: the truth of any
    other tensor is guarded, and guessed where nobody knows it. given: what the first reads give, of which a step has
    told so many. asks: for facts, which are taken to hold where no data say so. counts: of masks it is guarded whether
    they select rows, and which places a loop goes through, for the model does more with their number than to leave
    calls out; has_counted: it does."""

    sized: frozenset[Line | None] = frozenset()
    is_permitted: bool = True
    guards: bool = False
    given: tuple[Value, ...] = ()
    told: int = 0
    asks: bool = True
    counts: bool = False
    has_counted: bool = False
    known: list[Read] = field(default_factory=list)
    tensors: list[Tensor | None] = field(default_factory=list)
    selected: set[Line | None] = field(default_factory=set)
    branches: Branches = field(default_factory=Branches)
    so_far: SoFar | None = None  # the trace that goes on
    state: SoFar | None = None  # the same, of what hangs on the model's own state alone

    def anew(self, known: Iterable[Read] = (), **changes: Any) -> Reads:
        """Begin the reads of other runs, of which so many are known."""
        return replace(self, known=list(known), tensors=[], so_far=None, state=None, **changes)

    def start(self, *so_far: SoFar) -> None:
        """A run begins. so_far: what it computes, if that can be known, of all its inputs and of the model's state."""
        self.tensors.clear()
        self.so_far, self.state = so_far or (None, None)

    def take(self, function: Any, tensor: Tensor, line: Line | None) -> Value:
        """The value of the next read. Raises Unknown if no trace has come this far, and this one cannot go on."""
        if len(self.tensors) == len(self.known):
            is_told = len(self.known) < len(self.given)
            value = self.given[len(self.known)] if is_told else self._found(function, tensor)
            if value is None:
                raise Unknown(function, tensor, line)
            self.known.append(Read(function, line, value))
        return self._next(tensor)

    def _found(self, function: Any, tensor: Tensor) -> Value | None:
        """What a read gives for the example batch, if this trace can go on with it."""
        return None if self.so_far is None else self.so_far.read(_reader(function)[1], tensor)

    def guard(self, tensor: Tensor, line: Line | None, guess: bool, function: Any = Tensor.__bool__) -> Value:
        """The truth of a tensor. guess: it most likely is, where no step has told yet, and no buffer of the model (a
        flag that its first call sets), which all ranks have alike."""
        position = len(self.tensors)
        if position == len(self.known):
            if position >= _MOST:
                raise refusal(_TOO_MANY, line)
            loop = _LOOP.match(linecache.getline(*line).strip()) if line else None
            if loop is not None:  # so that the first step finds its end, in whichever round
                has_rounds = sum(read.line == line for read in self.known) < max(_ROUNDS, 2 * self.told)
                guess = has_rounds != bool(loop[1])
            else:  # a model has its checks in each layer: each is as the last one was told, or had to be
                here = [read.line == line for read in self.known]
                told = [read for read, is_here in zip(self.known[: len(self.given)], here, strict=False) if is_here]
                guess = bool(told[-1].value) if told else self._stated(tensor, guess)
                guess = guess if sum(here) - len(told) < _REPEATED else not guess  # as in a loop that has to end
            value = guess if position >= len(self.given) else self.given[position]
            value = AnyRows(bool(value)) if function is ANY_ROWS else value
            self.known.append(Read(function, line, value, position >= self.told, is_guard=True))
        return self._next(tensor)

    def _stated(self, tensor: Tensor, guess: bool) -> bool:
        """What buffers say of the truth of a tensor; a guess where they do not."""
        found = None if self.state is None else self.state.read(bool, tensor)
        return guess if found is None else bool(found)

    def guard_places(self, mask: Tensor, line: Line | None) -> tuple[int, ...]:
        """The places where a mask [n] is True, which a loop of the model goes through: all, where no step has told."""
        position = len(self.tensors)
        if position == len(self.known):
            is_known = position < len(self.given)
            value = self.given[position] if is_known else tuple(range(len(mask)))
            self.known.append(Read(PLACES, line, value, not is_known, is_guard=True))
        found = self._next(mask)
        assert isinstance(found, tuple)
        return found

    def rows(self, counts: Tensor, line: Line | None) -> None:
        """The last read of a step: how many rows each mask selects."""
        if len(self.tensors) == len(self.known):
            self.known.append(Read(ROWS, line, (), is_guard=True))
        self._next(counts)

    def _next(self, tensor: Tensor) -> Value:
        read = self.known[len(self.tensors)]
        self.tensors.append(tensor.detach().clone() if read.is_checked else None)  # the model may write into it later
        return read.value

    def holds(self, fact: str, tensor: Tensor, line: Line | None, has_data: bool) -> bool:
        """Whether a fact holds, of a batch that has no data as far as is known."""
        position = len(self.tensors)
        if position == len(self.known) and not has_data:
            value = position >= len(self.given) or bool(self.given[position])
            self.known.append(Read(fact, line, value, position >= self.told))
        return bool(self.take(fact, tensor, line))

    def learn(self, unknown: Unknown, traced: Traced, inputs: Sequence[Tensor | None]) -> None:
        """Compute the value that ended a trace; `traced` returns its tensor."""
        with torch.no_grad():
            tensor = traced.run(*inputs)[0]
        self.known.append(Read(unknown.function, unknown.line, _reader(unknown.function)[1](tensor)))


def needed(traced: Traced) -> list[int]:
    """The positions of the inputs that the results depend on. Drops all else from the graph; of what asks a tensor for
    its shape alone, that tensor too."""
    for node in traced.graph.nodes:
        call = filled(node) if node.op == "call_function" else None
        if call is not None:
            node.target, node.args, node.kwargs = call[0], call[1], {**call[2], "device": node.meta["val"].device}
    traced.graph.eliminate_dead_code()
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return [i for i, node in enumerate(placeholders) if node.users]


def known_inputs(
    traced: Traced, unknown: Unknown, given: Sequence[tuple[Input, Tensor | None]], device: torch.device
) -> tuple[Traced, list[torch.Tensor | None]]:
    """The trace without what an unknown value does not need, and the data that it needs. given: the inputs,
    each with what it stands for."""
    tensors: list[torch.Tensor | None] = [None] * len(given)
    for position in needed(traced):
        entry, tensor = given[position]
        if tensor is not None and is_steady(entry, tensor):
            tensors[position] = tensor.to(device, copy=True)  # where the trace makes its own; it may write into it
            continue
        raise refusal(not_steady(entry.kind, entry.name, unknown.function), unknown.line)
    return traced, tensors
