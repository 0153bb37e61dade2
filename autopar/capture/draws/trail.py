"""Follow a run of the model from coin to coin: which calls it makes, and of which results of earlier ones.

A coin is the truth of a tensor that hangs on random numbers alone (`if torch.rand([]) < p`). It begins a segment of the
run; a call is known by its segment and its number in it, so that two runs which differ in one segment agree elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from autopar.capture.data.known_values import leaves, version_of
from autopar.capture.refusals.location import Line
from autopar.torch_compat import OpOverload, storage_of

Tensor = torch.Tensor
Place = tuple[Any, ...]  # ("call", segment, number, result), ("input", number), ("outside", id), ("by", function, ...)
_SAME = (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy, torch.ops.aten.detach, torch.ops.aten.alias)
UNKNOWN: Place = ("unknown",)
FIRST = 1 << 40  # where random ops are numbered from, so that a seed which the model sets is told from one of ours


def numbered() -> int:
    """How many random ops there were so far in the run: see `Raise`, which keeps the count in torch's generator."""
    return torch.default_generator.initial_seed() - FIRST


@dataclass(frozen=True, slots=True)
class TrailStep:
    """A call: its function with what is no tensor, where its tensors come from, and whether it writes into one that is
    older than `since`, the place at which that memory was met first."""

    key: int
    operands: tuple[Place, ...]
    written: tuple[Place, ...]
    draws: int  # random ops so far, this call's among them


@dataclass(slots=True)
class Trail:
    """One run. side: what is taken out of the coin of a number.
    is_shapeless: it is compared with runs in which there are more rows, or fewer."""

    side: Callable[[int, Tensor, Callable[[Any], Any]], Any]
    segments: list[list[TrailStep]] = field(default_factory=lambda: [[]])
    coins: list[Tensor] = field(default_factory=list)
    lines: list[Line | None] = field(default_factory=list)
    met: list[int] = field(default_factory=list)  # random ops before each coin
    sides: list[Any] = field(default_factory=list)
    reads: list[Callable[[Any], Any]] = field(default_factory=list)
    shapes: dict[Place, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    births: dict[Place, Place] = field(default_factory=dict)  # of each place, where its memory was met first
    wanted: set[Place] = field(default_factory=set)
    found: dict[Place, Tensor] = field(default_factory=dict)  # the tensors at those
    is_shapeless: bool = False
    is_idle: bool = False  # what is called is no part of the run
    _known: dict[int, tuple[Tensor, Place]] = field(default_factory=dict)
    _born: dict[Any, Place] = field(default_factory=dict)  # by memory, where it was met first
    _taken: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def at(self) -> tuple[int, int]:
        """The segment, and how many calls it has so far."""
        return len(self.segments) - 1, len(self.segments[-1])

    @contextmanager
    def idle(self) -> Iterator[None]:
        """What is called meanwhile is no part of the run."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    def given(self, tensors: Iterable[Tensor]) -> None:
        """The inputs of the run."""
        for position, tensor in enumerate(tensors):
            self._enter(tensor, ("input", position))

    def coin(self, tensor: Tensor, line: Line | None, read: Callable[[Any], Any]) -> Any:
        """The side of a coin; the one that it had before, if it is asked again."""
        key = id(tensor), version_of(tensor), read
        if key not in self._taken:
            number = len(self.coins)
            self._taken[key] = self.side(number, tensor, read)
            self.coins.append(tensor)  # held, so that its id stays its own
            self.lines.append(line)
            self.reads.append(read)
            self.met.append(numbered())
            self.sides.append(self._taken[key])
            self.segments.append([])
        return self._taken[key]

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any, written: Sequence[Tensor]) -> None:
        """A call with what it returned, and what it wrote into."""
        if self.is_idle:
            return
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if not made and not written:
            return
        operands: list[Place] = []
        key = self._key((args, kwargs), operands)
        name = getattr(function, "__name__", "") or repr(function)
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        if isinstance(function, OpOverload):  # torch's machinery calls it, not in all runs alike
            is_same = function.overloadpacket in _SAME and bool(operands)
            for i, tensor in enumerate(made):
                self._enter(tensor, operands[0] if is_same else ("by", name, i, *operands))
            return
        segment, number = self.at
        since = tuple(self._born.get(storage_of(tensor), UNKNOWN) for tensor in written)
        step = TrailStep(hash((name, owner, key)), tuple(operands), since, numbered())
        self.segments[-1].append(step)
        changed = {id(tensor) for tensor in written}
        given = {id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)} - changed
        for i, tensor in enumerate([*made, *written]):
            if id(tensor) not in given:  # x.to(x.device) is x
                self._enter(tensor, ("call", segment, number, i))

    def leave(self, results: Iterable[Any]) -> None:
        """The end of the run: what it gives."""
        operands = tuple(self.place_of(leaf) for leaf in results if isinstance(leaf, Tensor))
        self.segments[-1].append(TrailStep(0, operands, (), numbered()))

    def joined(self, tensor: Tensor, place: Place) -> None:
        """A tensor is used in place of what was at a place."""
        self._known[id(tensor)] = tensor, place

    def made_of(self, tensor: Tensor) -> Any:
        """What a tensor is made of, as of two that are computed alike."""
        place = self.place_of(tensor)
        if place[0] != "call":
            return place
        step = self.segments[place[1]][place[2]]
        return step.key, step.operands, place[3]

    def place_of(self, tensor: Tensor) -> Place:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        is_outside = type(tensor) in (Tensor, torch.nn.Parameter)
        self._enter(tensor, ("outside", id(tensor)) if is_outside else (*UNKNOWN, tensor.shape, tensor.dtype))
        return self._known[id(tensor)][1]

    def _enter(self, tensor: Tensor, place: Place) -> None:
        self._known[id(tensor)] = tensor, place
        self.shapes[place] = tensor.shape, tensor.dtype
        self.births[place] = self._born.setdefault(storage_of(tensor), place)
        if place in self.wanted:
            self.found[place] = tensor

    def _key(self, value: Any, operands: list[Place]) -> int:
        if isinstance(value, Tensor):
            operands.append(self.place_of(value))
            return hash((() if self.is_shapeless else tuple(value.shape), str(value.dtype)))
        if isinstance(value, (tuple, list)):
            return hash(tuple(self._key(item, operands) for item in value))
        if isinstance(value, dict):
            return hash((tuple(value), tuple(self._key(item, operands) for item in value.values())))
        if isinstance(value, slice):
            return self._key((value.start, value.stop, value.step), operands)
        if isinstance(value, np.ndarray):
            return hash((value.shape, value.tobytes()))
        if isinstance(value, (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
            return hash((type(value).__name__, repr(value)))
        return hash((type(value).__qualname__, id(value)))  # a run with another one is another run
