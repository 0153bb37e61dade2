"""A step must be the same the next time: the model is run once more on shapes, and the two runs are compared.

What differs was a number or a tensor that the model took from outside of its inputs: a clock, a generator, or what it
kept in Python from the step before. A compiled step would hold the first one for ever.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from autopar.capture.data.coins import numbers_drawn
from autopar.capture.data.foreign import foreign_state, kept, settings
from autopar.capture.data.recorded_calls import GIVEN, HostFloat, RecordedCall, RecordedCalls, first_difference
from autopar.capture.python.attributes import AttributeChange, Attributes
from autopar.capture.python.counters import CountedNumbers
from autopar.capture.python.left_values import LeftByOthers, LeftValue, left_values
from autopar.capture.python.ran import LIBRARIES
from autopar.capture.refusals.constructs import FIRST_CALL, UNSTEADY, Construct
from autopar.capture.refusals.explain_failure import SPECIALIZE, line_of, refusal
from autopar.capture.refusals.user_lines import Line, lines_that_change, quoted
from autopar.errors import AutoparError, CaptureError

_PLAIN = (int, float, bool, str, type(None))
_NAMED = 3  # changes that a message names
_MADE = {
    "parameter": Construct(
        "a parameter '{}' that is made or replaced while the model runs",
        "No optimizer knows it, and a compiled step never makes it again: make it in __init__.",
    ),
    "module": Construct("a module '{}' that is made while the model runs", "Make it in __init__."),
}
_STATE = (
    "Python runs only at the capture, so every later step would see the same. Make it a buffer "
    "(self.register_buffer in __init__, then write into it), or pass it in with the batch and return the new one."
)
_STAYS = "; a compiled step runs no Python, so it stays as it is: return what the loop reads of it"
_OTHERS = (
    "the model {} what another step of it (in another mode, of another size or with another flag) leaves in "
    "Python, {}It is {}. Compiled steps run no Python, so this one would {} what was there before. Make it a "
    "buffer (self.register_buffer in __init__, then write into it), or return it beside the loss (model.last_aux) and "
    "set it between the steps."
)
_ITERATOR = (
    "a step takes the next item of {}, an iterator outside of the model. Python runs only at the capture, so that no "
    "later step would take one: take it before the step, and pass it in with the batch."
)
_UNFOLLOWED = ". Whether a later step would do something else was not found out: keep it in an attribute of an object"
_DRAWN = (
    "A compiled step would keep those of its capture for ever: draw them outside of the model and pass them in, "
    "or use torch.rand (see docs/random.md)."
)


class HostDrawsFound(CaptureError):
    """The model computes with numbers that it draws on the host. floats: the places of some of them, which calls are
    given as floats."""

    def __init__(self, message: str, floats: Iterable[tuple[int, int | str]] = ()) -> None:
        super().__init__(message)
        self.floats = frozenset(floats)


class ShapeRun(Protocol):
    """Runs forward and loss on shapes. is_watched: it notes which of the user's functions run (see `Ran.watch`)."""

    def __call__(self, calls: RecordedCalls, is_watched: bool = True) -> object: ...


@dataclass(frozen=True, slots=True)
class Steady:
    """Two runs of a model, whose modules `find` gives by path. `run(calls)` makes another one; `drawn` is
    the state of the generators of Python and numpy before the first run, whose calls are `first`."""

    find: Callable[[str], nn.Module]
    run: ShapeRun
    first: RecordedCalls
    attributes: Attributes
    replaced: dict[str, Any]  # plain tensor attributes as the first run left them; emptied where one starts anew
    drawn: Mapping[str, Any]
    standing: frozenset[str]  # names of the tensors that others stand in for while the model runs
    vary: Callable[[int], None]  # other floats of random tensors
    selects: bool  # rows by a mask, another number of them in the second run (see `selected.py`)
    may_specialize: bool  # this number of rows
    counters: Callable[[bool, Callable[[], object]], CountedNumbers]  # see `CountedNumbers.of`
    others: LeftByOthers
    left: list[LeftValue]  # is given what this program would leave in Python
    lines: dict[str, str] = field(default_factory=dict)  # of changes, by name

    def check(self) -> list[str]:
        """Notes on what the model changes in Python. Raises CaptureError for what would make the next step differ."""
        changes = self.attributes.changes()
        for name, now in self.replaced.items():
            kind = "parameter" if isinstance(now, nn.Parameter) else "value"
            changes.append(AttributeChange(name.removeprefix("model."), kind, now))
        for change in changes:
            if change.kind in _MADE:
                made = _MADE[change.kind]
                ((_, line),) = self._lines_of([change])
                raise refusal(Construct(made.name.format(change.name), made.instead), line)
        drawn = [name for name, state in foreign_state().items() if state != self.drawn[name]]
        left = left_values(changes, self._is_constant)
        with kept():
            notes = self._compare(changes, drawn, left) + [self._drawn_idly(name) for name in drawn]
            self._check_floats()
            self._check_others()
        self.left[:0] = [replace(each, where=self.lines.get(each.name, "")) for each in left]
        return notes

    def _check_others(self) -> None:
        """Raise CaptureError where what other programs would leave in Python decides what this one does."""
        if not self.others.values:
            return
        self.start_anew()
        put_back = self.others.put(self.attributes, self.standing, self.replaced)
        try:
            calls, error = self._second(met=self.others.tensors)
        finally:
            put_back()
            self.start_anew()
        difference = first_difference(self.first, calls)
        if error is None and difference is None:
            return
        alone, fault = self._second()
        self.start_anew()
        if fault is not None or first_difference(self.first, alone) is not None:
            return  # it is another one anyway, which was looked at before
        call = difference[1] or difference[0] if difference and error is None else None
        line = call.line if call else line_of(error) if error else None
        names = ", ".join(map(str, self.others.values[:_NAMED]))
        says = ("returns", "return") if call and call.function == GIVEN else ("computes with", "compute with")
        where = f"at {quoted(line)}" if line else "at an unknown line. "
        raise CaptureError(_OTHERS.format(says[0], where, names, says[1]))

    def _compare(self, changes: list[AttributeChange], drawn: list[str], left: list[LeftValue]) -> list[str]:
        """Notes of a second run. left: by the changes; a number that tells how much of a table there is goes."""
        second, error = self._second()
        if error is not None:
            if changes and self._fresh()[1] is None:
                text = next(iter(str(error).splitlines()), "")
                raise self.carried(changes, line_of(error), f": {type(error).__name__}: {text}")
            return self._notes(changes)
        difference = first_difference(self.first, second)
        if difference is not None and drawn:
            raise self.draws(drawn[0])
        if difference is not None and not (changes and self._settles(second, changes)):
            if changes and first_difference(self.first, self._fresh()[0]) is None:
                call = difference[1] or difference[0]
                raise self.carried(changes, call.line if call else None, "")
            raise self.unsteady(difference)
        if difference is not None:
            left[:] = [each for each in left if each.has_tensors]
        outside = self._check_counters(changes)
        return self._notes(changes) + outside

    def _check_counters(self, changes: list[AttributeChange]) -> list[str]:
        """Notes on numbers that runs change outside of the model. Raises CaptureError for any that decides what a step
        does."""
        found = self.counters(any(type(c.new) in (int, float) for c in changes), lambda: self._made(RecordedCalls()))
        if found.iterators:
            raise CaptureError(_ITERATOR.format(found.iterators[0]))
        line = found.deciding(self.start_anew, self._does_other)
        if line is not None:
            raise found.error(line)
        known = {change.name for change in changes}
        spots = [*found.spots, *(each.spot for each in found.lists if not each.has_tensors)]
        self.left.extend(LeftValue(s.name, None, s.where, s) for s in found.spots if s.name not in known)
        told = [f"{spot} is changed while the model runs{_STAYS}" for spot in spots if spot.name not in known]
        return told + [f"{spot} is changed while the model runs{_STAYS}{_UNFOLLOWED}" for spot in found.unfollowed]

    def _does_other(self) -> bool:
        calls, error = self._second()
        return error is not None or first_difference(self.first, calls) is not None

    def draws(self, name: str) -> HostDrawsFound:
        """The error for numbers of a generator."""
        (line,) = self._again(partial(_state_of, name))
        where = f", at {quoted(line)}" if line else ". "
        return HostDrawsFound(f"the model draws numbers from {name} while it runs{where}{_DRAWN}")

    def _drawn_idly(self, name: str) -> str:
        """A note on numbers that decide nothing. Raises CaptureError if they do."""
        before: RecordedCalls | None = None
        for _ in settings():
            self.start_anew()
            calls, error = self._second(shows_data=True)
            is_other = before is not None and calls.way() != before.way()
            if error is not None or is_other or len(calls.made) != len(self.first.made):
                raise self.draws(name)
            before = calls
        return f"the model draws numbers from {name} while it runs, and whatever they are, it computes the same"

    def _check_floats(self) -> None:
        """Raise HostDrawsFound where it matters what a draw is that the model makes a float of."""
        matters = self.first.has_any
        for draws in numbers_drawn() if self.first.has_floats and not matters else ():
            self.start_anew()
            calls, error = self._second(draws)
            matters = matters or error is not None or first_difference(self.first, calls) is not None
        if matters:
            raise HostDrawsFound("the model makes a float of a random number")

    def _second(
        self, draws: Callable[[], float] | None = None, shows_data: bool = False, met: Sequence[torch.Tensor] = ()
    ) -> tuple[RecordedCalls, Exception | None]:
        calls = RecordedCalls(self.first)
        calls.met(met)
        calls.shows_data = shows_data
        calls.draws = draws or calls.draws
        try:
            self.run(calls)
        except AutoparError:
            raise
        except Exception as error:
            return calls, error
        return calls, None

    def _settles(self, second: RecordedCalls, changes: list[AttributeChange]) -> bool:
        """True where the third run is the second, and what the program of the first does in the second step is what the
        model does in it: a table was made, and is found from then on. Compared by what constants hold, not by how they
        were made. What runs here ran before, and nothing more is noted of it."""
        if not self._stays(changes) and self._made(RecordedCalls(second), second) is None:
            return False
        self.start_anew()
        first = self._made(self.first.by_values())
        if first is None:
            return False
        anew = first.left()  # before the second run writes into them
        theirs = self._made(RecordedCalls(first, by_value=True))
        if theirs is None:
            return False
        held = theirs.held()
        self.start_anew()
        ours = self._made(anew(), theirs)  # as the program: none of the attributes in Python, and the buffers
        return ours is not None and ours.held() == held

    def _stays(self, changes: list[AttributeChange]) -> bool:
        """True where the second run left what the first did, numbers and texts alone: the third begins as the second
        did. changes: those of the first."""
        now = self.attributes.changes()
        alike = len(now) == len(changes) and all(
            (one.name, type(one.new), one.new) == (other.name, type(other.new), other.new)
            for one, other in zip(changes, now, strict=True)
            if type(one.new) in _PLAIN
        )
        return alike and not self.replaced and all(type(change.new) in _PLAIN for change in changes)

    def _made(self, calls: RecordedCalls, like: RecordedCalls | None = None) -> RecordedCalls | None:
        """Make another run; None if it fails, or is not like an earlier one."""
        try:
            self.run(calls, is_watched=False)
        except Exception:
            return None
        return calls if like is None or first_difference(like, calls) is None else None

    def start_anew(self) -> None:
        """Put back what runs have changed."""
        self.attributes.restore()
        self.replaced.clear()

    def _fresh(self) -> tuple[RecordedCalls, Exception | None]:
        """Another run, from what the model was at first."""
        self.start_anew()
        return self._second()

    def check_floats_of_host(self) -> None:
        """Raise HostDrawsFound where a call is given a float that is another one if others are drawn."""
        found: list[HostFloat] = []
        with kept():
            for number, _ in enumerate(settings(), 1):
                self.vary(number)
                calls, _error = self._fresh()
                for one, other in zip(self.first.floats, calls.floats, strict=False):
                    if (one.place, one.function) != (other.place, other.function):
                        break
                    found += [one] * (one.value != other.value)
        self.vary(0)
        if found:
            raise HostDrawsFound("the model computes with a float that it draws", (one.place for one in found))

    def _again(self, *states: Callable[[], object]) -> list[Line | None]:
        """For each state the line that changes it, from another run."""
        self.start_anew()
        return lines_that_change(lambda: self.run(RecordedCalls(), is_watched=False), states) if states else []

    def _lines_of(self, changes: Iterable[AttributeChange]) -> list[tuple[AttributeChange, Line | None]]:
        """Changes, each with its line."""
        found = _distinct(changes)
        return list(zip(found, self._again(*map(self._state_of, found)), strict=True))

    def _state_of(self, change: AttributeChange) -> Callable[[], object]:
        """What another line makes another: the change, or of what stands in for it while the model runs, its object."""
        owner, _, name = change.name.rpartition(".")
        if change.name in self.standing:
            return lambda: id(getattr(self.find(owner), name, None))
        return self.attributes.watch(change.name)

    def carried(self, changes: list[AttributeChange], line: Line | None, rest: str) -> CaptureError:
        """The error for a step that depends on what the step before it changed. rest: what came of it."""
        found = self._lines_of(changes)
        names = ", ".join(f"'{change.name}'{f' ({_short(at)})' if at else ''}" for change, at in found)
        line = line or next((at for _, at in found if at), None)
        where = f"at {quoted(line)}" if line else "at an unknown line:\n"
        return CaptureError(
            f"a second step would not be the same as the first{rest}, {where}"
            f"It depends on what the model itself changed in the step before: {names}. {_STATE} {FIRST_CALL}"
        )

    def unsteady(
        self, difference: tuple[RecordedCall | None, RecordedCall | None], line: Line | None = None
    ) -> CaptureError:
        """The error for a number that is another one in each run. line: of what computes with it, if no call does."""
        one, other = difference
        call = one or other
        line = call.line if call else line
        text = linecache.getline(*line) if line else ""
        source = next((name for pattern, name in UNSTEADY if pattern.search(text)), "")
        numbers = ""
        if one and other and len(one.numbers) == len(other.numbers):
            pairs = [(a, b) for a, b in zip(one.numbers, other.numbers, strict=True) if repr(a) != repr(b)]
            numbers = f" ({pairs[0][0]:.6g} first, then {pairs[0][1]:.6g})" if pairs else ""
        where = f"at {quoted(line)}" if line else "at an unknown line:\n"
        if self.selects and not source:
            return CaptureError(
                f"the model computes with how many rows a mask selects{numbers}, {where}That number is data: count in "
                f"a tensor instead, mask.sum(), and choose by torch.where(mask.sum() > n, a, b). As the size of a view "
                f"or of a new tensor write h.shape[0] for len(h)."
                f"{SPECIALIZE if self.may_specialize else ''}"
            )
        return CaptureError(
            f"the model {'returns' if call and call.function == GIVEN else 'computes with'} a number that is another "
            f"one each time it runs{numbers}, {where}"
            f"It comes from {source or 'a clock, a generator, a file or a global variable'}. A compiled step would "
            f"keep that of its capture for ever: pass it in with the batch as a tensor, or draw by torch.rand."
        )

    def _notes(self, changes: list[AttributeChange]) -> list[str]:
        """A cached tensor that is made of constants is made again or not, all the same; and a library's own books
        nobody would change."""
        told = [change for change in changes if not self._is_constant(change.new)]
        lines = self._lines_of(c for c in told if not self._is_of_library(c))
        self.lines.update({change.name: _short(line) for change, line in lines if line})
        return [
            f"'{change.name}' is changed at {_short(line)} while the model runs{_STAYS}"
            for change, line in lines
            if line and LIBRARIES not in line[0]
        ]

    def _is_of_library(self, change: AttributeChange) -> bool:
        """True for the attribute of a module whose class a library has. Those of torch's own modules a user sets."""
        path, found = change.name, None
        while path and found is None:
            path = path.rpartition(".")[0]
            with suppress(KeyError):  # an attribute of what a module holds
                found = self.find(path)
        home = "torch." if found is None else type(found).__module__
        return not home.startswith("torch.") and LIBRARIES in str(getattr(sys.modules.get(home), "__file__", ""))

    def _is_constant(self, value: Any) -> bool:
        return hasattr(value, "grad_fn") and not self.first.comes_from_input(value)


def _state_of(name: str) -> object:
    return foreign_state()[name]


def _distinct(changes: Iterable[AttributeChange]) -> list[AttributeChange]:
    return list({change.name: change for change in changes}.values())[:_NAMED]


def _short(line: Line) -> str:
    return f"{os.path.basename(line[0])}:{line[1]}"
