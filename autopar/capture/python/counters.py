"""Find what a run counts up in Python (`self.calls += 1`), and whether that decides what a step does.

A compiled step runs no Python: a number that only grows may stay as it is, but one of `if self.calls > 1000` would be
that of the capture for ever, though two runs, one behind the other, do the same. So a run is made with numbers that
note how they are compared, another one for each comparison that has the other answer, and one that comes much later,
when lists that grow are long, and those that shrink are empty. (They are numbers, with values to choose by. A `Scalar`
of stand_in.py is none: it stands for all values that a step may have.)
"""

from __future__ import annotations

import dis
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from autopar.capture.python.guards import Guards
from autopar.capture.python.library_state import Sequenced
from autopar.capture.python.ran import LIBRARIES, Ran, Root, own_roots, with_nested
from autopar.capture.python.scalars import GONE
from autopar.capture.python.spots import Spot
from autopar.capture.refusals.location import user_frame
from autopar.capture.refusals.user_lines import Line, quoted
from autopar.errors import CaptureError

MOST = 16  # comparisons of which both compared are tried
_FAR = 1009  # how much later a number is tried: what it chooses without a comparison (`table[calls // 100]`)
_WRITES = frozenset(("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL"))
_CALLS = frozenset(  # names of what changes an object
    ("append", "appendleft", "extend", "insert", "next", "pop", "popleft", "remove", "clear")
)
_COUNTED = (
    "what a step does hangs on what changes while it runs: {}{}Python runs only at the capture, so every "
    "later step would do what the first does. Decide outside of the step, by a flag that is set before it "
    "(model.is_late = step > 1000) and has a program for each of its values; or count in a buffer, and choose by "
    "torch.where."
)
_NAMED = 3  # numbers that a message names
_ARITHMETIC = (
    "__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__", "__radd__", "__rsub__",
    "__rmul__", "__rtruediv__", "__rfloordiv__", "__rmod__", "__rpow__", "__neg__", "__pos__", "__abs__",
)  # fmt: skip
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")


class Comparisons:
    """The comparisons of counted numbers in a run. other: the one that has the other answer; line: where that is."""

    def __init__(self, other: int | None = None) -> None:
        self.count, self.other = 0, other
        self.line: Line | None = None

    def give(self, answer: bool) -> bool:
        """The answer of the next comparison."""
        is_other, self.count = self.count == self.other, self.count + 1
        if is_other:
            self.line = user_frame(sys._getframe())
        return answer != is_other


class _Counted:
    """What both kinds of counted numbers are."""

    compared: Comparisons


class _Int(_Counted, int):
    pass


class _Float(_Counted, float):
    pass


_KINDS: dict[type, type[Any]] = {int: _Int, float: _Float}


def counted(number: Any, compared: Comparisons) -> Any:
    """The number, as one that notes how it is compared; what is no number, as it is."""
    kind = _KINDS.get(type(number))
    if kind is None:
        return number
    made = kind(number)
    made.compared = compared
    return made


def _called(base: type, name: str, self: Any, others: tuple[Any, ...]) -> Any:
    """What a number's own method gives; for an integer that meets a float, that of the float that it is."""
    given = [float(other) if isinstance(other, _Float) else other for other in others]
    result = getattr(base, name)(self, *given)
    if result is NotImplemented and others and isinstance(others[0], float):
        result = getattr(float, name)(float(self), *given)
    return result


def _arithmetic(base: type, name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return counted(_called(base, name, self, others), self.compared)

    return method


def _comparison(base: type, name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        result = _called(base, name, self, others)
        return result if result is NotImplemented else self.compared.give(result)

    return method


for _base, _kind in _KINDS.items():
    for _name in _ARITHMETIC:
        setattr(_kind, _name, _arithmetic(_base, _name))
    for _name in _COMPARISONS:
        setattr(_kind, _name, _comparison(_base, _name))
    _kind.__hash__ = _base.__hash__  # type: ignore[method-assign]


class _Watched:
    """Stands for an iterator while a run is made."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator, self.is_used = iterator, False

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self.is_used = True
        return next(self.iterator)


@dataclass(frozen=True, slots=True)
class GrowingList:
    """A list or a deque, with what was in it, and what will be much later."""

    spot: Spot
    items: list[Any]
    later: list[Any] = field(default_factory=list)

    @property
    def has_tensors(self) -> bool:
        """Whether it holds tensors of runs, which `leftovers.py` tells."""
        return any(isinstance(item, torch.Tensor) for item in self.items)

    def moving(self) -> GrowingList:
        """It has another length behind a run: if it grew it will be long, else empty."""
        grew = len(self.spot.value) > len(self.items)
        return replace(self, later=[*self.items, *[self.spot.value[-1]] * _FAR] if grew else [])

    def put(self, is_late: bool) -> None:
        """Have it hold what it does."""
        self.spot.value.clear()
        self.spot.value.extend(self.later if is_late else self.items)


@dataclass(frozen=True, slots=True)
class CountedNumbers:
    """The numbers that each run changes: of the modules, and of what the loss function and the code that ran read.

    unfollowed: those that stand where no other number can be put, as in a tuple or a class. iterators: of which each
    run takes items, that are gone then."""

    spots: Sequence[Spot] = ()
    unfollowed: Sequence[Spot] = ()
    lists: Sequence[GrowingList] = ()
    iterators: Sequence[Spot] = ()

    @staticmethod
    def of(model: nn.Module, loss_fn: Any, ran: Ran, is_changed: bool, run: Callable[[], object]) -> CountedNumbers:
        """Look at what a run changes, where it may change anything; afterwards numbers are what they were. is_changed:
        numbers of modules, which are looked at anyway."""
        if not is_changed and not any(map(_writes, _own_code(ran))):
            return CountedNumbers()
        guards = Guards(model, loss_fn, ran)
        lists = [GrowingList(spot, list(spot.value)) for spot in guards.spots if type(spot.value) in Sequenced]
        cells = [Spot(root.name, root.where, root.holder, root.key, _at(root)) for root in _cells(loss_fn)]
        watched = [(spot, _Watched(spot.value)) for spot in guards.spots if _is_iterator(spot.value) and _is_free(spot)]
        for spot, stand_in in watched:
            spot.put(stand_in)
        run()
        for spot, _ in watched:
            spot.put(spot.value)
        pairs = [(change.old, change.new.value) for change in guards.changes() if change.old and change.new]
        pairs += [(spot, spot.read()) for spot in cells]
        places = {(id(spot.holder), spot.key): spot for spot, now in pairs if _is_other(spot.value, now)}
        grown = [each.moving() for each in lists if len(each.spot.value) != len(each.items)]
        spots, others = list[Spot](), list[Spot]()
        for spot in places.values():
            (spots if _is_free(spot) else others).append(spot)
        found = CountedNumbers(spots, others, grown, [spot for spot, stand_in in watched if stand_in.is_used])
        found._put_back()
        return found

    def deciding(self, begin: Callable[[], None], is_other: Callable[[], bool]) -> Line | None:
        """The line that decides by them what a run does; None if there is none. begin: make all else as it was.
        is_other: make a run, and say whether it does something else."""
        compared = Comparisons()
        settings = [(compared, 0)] if self.spots or self.lists else []
        for given, later in settings:
            begin()
            for spot, now in _there(self.spots):
                spot.put(counted(now + later * isinstance(now, int), given))
            for each in self.lists:
                each.put(bool(later))
            try:
                if is_other():
                    return given.line or ("", 0)
            finally:
                given.other = None  # what is left of such numbers compares as they do
                begin()
                self._put_back()
            if given is compared:
                others = [(Comparisons(other), 0) for other in range(min(compared.count, MOST))]
                settings += [*others, (Comparisons(), _FAR)]
        return None

    def error(self, line: Line) -> CaptureError:
        """What is said where they decide at a line, of no file where it is not known."""
        names = ", ".join(map(str, [*self.spots, *(each.spot for each in self.lists), *self.unfollowed][:_NAMED]))
        return CaptureError(_COUNTED.format(names, f", at {quoted(line)}" if line[0] else ". "))

    def _put_back(self) -> None:
        for spot, _ in _there(self.spots):
            spot.put(spot.value)
        for each in self.lists:
            each.put(False)


def _there(spots: Sequence[Spot]) -> Iterator[tuple[Spot, Any]]:
    """What stands in the places now; not all of them are there before a run."""
    for spot in spots:
        with suppress(*GONE):
            yield spot, spot.read()


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _is_free(spot: Spot) -> bool:
    """Whether another number can be put in a place."""
    try:
        spot.put(spot.read())
    except (*GONE, TypeError):
        return False
    return True


def _own_code(ran: Ran) -> Iterator[CodeType]:
    """The code of the user's own files: what libraries keep is theirs."""
    for outer, _ in ran.codes:
        if LIBRARIES not in outer.co_filename:
            yield from (code for code in with_nested(outer) if code.co_name != "__init__")


@lru_cache(1024)
def _writes(code: CodeType) -> bool:
    """Whether code binds what stands outside of it."""
    free = set(code.co_freevars)
    return not _CALLS.isdisjoint(code.co_names) or any(
        one.opname in _WRITES or (one.opname == "STORE_DEREF" and one.argval in free)
        for one in dis.get_instructions(code)
    )


def _cells(function: Any) -> list[Root]:
    """The closure of a function, whose variables it may bind (`nonlocal`)."""
    roots = own_roots(function) if isinstance(function, FunctionType) else ()
    return [root for root in roots if root.key == "cell_contents" and _at(root) is not None]


def _at(root: Root) -> Any:
    try:
        return getattr(root.holder, root.key)
    except ValueError:  # not bound yet
        return None


def _is_other(was: Any, now: Any) -> bool:
    return type(was) is type(now) and type(was) in _KINDS and bool(was != now)
