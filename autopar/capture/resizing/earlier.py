"""Make the program of another size from those of earlier ones, where the forward pass at that very size allows it.

A step is captured in full at three sizes of its batch. At the next one its forward pass alone is traced. If that is the
same graph as at the other three but for numbers, and so is what autograd keeps of it, then the whole program is theirs
with other numbers: each that changes is one that the forward pass has too (a size, a stride, an argument, a number of
elements; or the negative of one, or one more or less), the same one at all three sizes, and has its value of now.
Nothing is extrapolated: numbers of the forward pass that were the same at all three sizes must be the same again,
whatever they were, and numbers that did not differ from each other may not differ now. So branches on the size,
roundings and loops lead to a capture, as do

- what runs functions of the user's in the backward pass: custom autograd functions, hooks, checkpoints;
- values that are read from the batch, branches on data, rows selected by a mask, numbers drawn in Python, other models
  in the loss, and attributes that change while the model runs;
- sizes of 0 and 1 in place of larger ones, for which torch computes otherwise;
- graphs with a value of which nothing is known (see `skeleton.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

import torch

from autopar.capture.python.guards import Guards
from autopar.capture.python.ran import Ran
from autopar.capture.resizing.skeleton import Number, Skeleton, Unsupported, of_program, with_numbers
from autopar.ir.program import Program

ENOUGH = 3  # captures in full
_KEPT = 6  # of one structure, the last ones
_STRUCTURES = 16
# What hooks a function to the backward pass; the rest of what runs there shows in the graph of autograd.
_HOOKS = frozenset(
    ("register_hook", "register_prehook", "register_multi_grad_hook", "register_post_accumulate_grad_hook",
     "register_full_backward_hook", "register_full_backward_pre_hook", "register_module_full_backward_hook",
     "register_module_full_backward_pre_hook", "saved_tensors_hooks", "save_on_cpu")
)  # fmt: skip

Vector = tuple[Number, ...]  # a number at each of the sizes that are compared


@dataclass(frozen=True, slots=True)
class TracedForward:
    """A traced forward pass. sizes: of the tensors of the batch. constants: the tensors that the trace made, or took
    from elsewhere."""

    skeleton: Skeleton
    sizes: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class SizedCapture:
    """A capture in full. places: where the constants of the program are among those of its forward pass. told: the
    notes of the forward pass."""

    forward: Vector
    sizes: tuple[int, ...]
    program: Vector
    places: Mapping[str, int]
    told: tuple[str, ...]


@dataclass(slots=True)
class _Group:
    """The samples of one structure. template: the last one's program."""

    program: Hashable
    template: Program
    samples: list[SizedCapture] = field(default_factory=list)
    is_refused: bool = False  # two programs of one forward pass, or a number of no known origin


class Earlier:
    """The captures of one step with batches of several sizes."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self.ran = Ran()  # in all of them
        self.guards: Guards | None = None  # of what ran in all of them, once they are enough
        self.made = 0  # programs that were not captured in full

    @property
    def is_enough(self) -> bool:
        """True if there may be a structure whose program need not be captured."""
        return any(len(group.samples) >= ENOUGH and not group.is_refused for group in self._groups.values())

    def add(
        self, forward: TracedForward, program: Program, constants: Mapping[str, torch.Tensor], told: Sequence[str]
    ) -> None:
        """Remember a capture in full. constants: those of the program that are not the model's own. told: the notes of
        the forward pass."""
        places = {name: _place_of(tensor, forward.constants) for name, tensor in constants.items()}
        try:
            whole = of_program(program)
        except Unsupported:
            return
        if -1 in places.values():  # made in the backward pass
            return
        group = self._groups.setdefault(forward.skeleton.structure, _Group(whole.structure, program))
        if group.program != whole.structure:
            group.is_refused = True
            return
        sample = SizedCapture(forward.skeleton.numbers, forward.sizes, whole.numbers, places, tuple(told))
        others = [each for each in group.samples if each.sizes != forward.sizes]
        group.samples, group.template = [*others[-_KEPT + 1 :], sample], program
        while len(self._groups) > _STRUCTURES:
            del self._groups[next(iter(self._groups))]

    def include(self, ran: Ran) -> None:
        """Remember what ran in a capture."""
        self.ran.include(ran)
        self.guards = None

    def find(self, forward: TracedForward) -> Foreseen | None:
        """What the capture of a step with this forward pass would give; None if it must be made."""
        group = self._groups.get(forward.skeleton.structure)
        if group is None or group.is_refused:
            return None
        samples = next((each for each in _chosen(group.samples) if _are_apart(each, forward.sizes)), None)
        known = None if samples is None else _known(samples, forward)
        if samples is None or known is None:
            return None
        numbers: list[Number] = []
        for was in zip(*(sample.program for sample in samples), strict=True):
            now = _now(was, known)
            if now is None:
                group.is_refused = True
                return None
            if now != was[0] and any(map(_is_special, (*was, now))):
                return None
            numbers.append(now)
        is_smooth = all(_follows(was, now, samples, forward) for was, now in known.items())
        return Foreseen(samples[0], group.template, tuple(numbers), is_smooth, forward.constants)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The program of another size, as far as the forward pass tells."""

    sample: SizedCapture
    template: Program
    numbers: Vector
    is_smooth: bool  # what changes in the forward pass follows the sizes, and no clock
    constants: tuple[torch.Tensor, ...]

    def program(self) -> tuple[Program, dict[str, torch.Tensor]]:
        """The program, and its constants that are not the model's own."""
        made = {name: self.constants[at] for name, at in self.sample.places.items()}
        return with_numbers(self.template, self.numbers), made


def may_hook(names: Iterable[str]) -> bool:
    """True if code with these names may hook something to the backward pass."""
    return not _HOOKS.isdisjoint(names)


def _place_of(tensor: torch.Tensor, constants: Sequence[torch.Tensor]) -> int:
    return next((at for at, each in enumerate(constants) if each is tensor), -1)


def _chosen(samples: Sequence[SizedCapture]) -> Iterator[tuple[SizedCapture, ...]]:
    return combinations(reversed(samples), ENOUGH)


def _are_apart(samples: Sequence[SizedCapture], sizes: tuple[int, ...]) -> bool:
    """True if each size of the batch is the same in all samples and now, or another one in each sample."""
    for at, size in enumerate(sizes):
        found = {sample.sizes[at] for sample in samples}
        if len(found) < len(samples) and found != {size}:
            return False
    return True


def _known(samples: Sequence[SizedCapture], forward: TracedForward) -> dict[Vector, Number] | None:
    """The numbers of the forward pass that change, by what they were in the samples, with what they are now; None if
    one is not what it should be."""
    known: dict[Vector, Number] = {}
    columns = zip(*(sample.forward for sample in samples), strict=True)
    for was, now in zip(columns, forward.skeleton.numbers, strict=True):
        if all(number == was[0] for number in was):
            if now != was[0]:
                return None
        elif known.setdefault(was, now) != now or any(map(_is_special, (*was, now))):
            return None
    return known


def _follows(was: Vector, now: Number, samples: Sequence[SizedCapture], forward: TracedForward) -> bool:
    """True if a number is, now too, that polynomial in one of the sizes which it was in the samples."""
    for at, size in enumerate(forward.sizes):
        xs = [sample.sizes[at] for sample in samples]
        if len({*xs}) == len(xs) and _at(size, xs, [n for n in was if isinstance(n, int)]) == now:
            return True
    return False


def _at(size: int, xs: Sequence[int], ys: Sequence[int]) -> Fraction | None:
    """The polynomial through some points at another one (Lagrange); None if points lack a number."""
    if len(xs) != len(ys):
        return None
    total = Fraction(0)
    for x, y in zip(xs, ys, strict=True):
        others = [other for other in xs if other != x]
        total += Fraction(y * math.prod(size - other for other in others), math.prod(x - other for other in others))
    return total


def _is_special(number: Number) -> bool:
    """True for sizes of which torch makes an exception."""
    return isinstance(number, int) and abs(number) <= 1


def _now(was: Vector, known: Mapping[Vector, Number]) -> Number | None:
    """What a number of the program is now; None if it changes and is none of the forward pass."""
    if all(number == was[0] for number in was):
        return was[0]
    if was in known:
        return known[was]
    for shift, sign in ((0, -1), (1, 1), (-1, 1)):
        source = tuple([sign * number - shift for number in was if isinstance(number, int)])
        value = known.get(source)
        if isinstance(value, int):
            return sign * (value + shift)
    return None
