"""Make inputs of Python numbers: where they stand, and what stands there while a step is captured."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.python.arithmetic import DTYPES, Number
from autopar.capture.python.spots import PLAIN, Spot, SpotKey
from autopar.capture.python.stand_in import Misuse, Scalar
from autopar.errors import CaptureError

Tensor = torch.Tensor
GONE = (KeyError, IndexError, AttributeError, ValueError)  # where nothing stands at a spot any more


@dataclass(frozen=True, slots=True)
class NumberPlace:
    """Where a number stands: at a spot, or in the tuple there."""

    key: SpotKey
    position: int | None

    def number(self, value: Any) -> Any:
        """The number in what stands at the spot; None if none does."""
        if self.position is not None:
            value = value[self.position] if type(value) is tuple and self.position < len(value) else None
        return value if type(value) in DTYPES else None

    def replaced(self, value: Any, other: Any) -> Any:
        """What stands at the spot with another value for the number."""
        if self.position is None:
            return other
        return tuple(other if i == self.position else item for i, item in enumerate(value))


def places_of(key: SpotKey, old: Spot | None, new: Spot | None) -> list[NumberPlace]:
    """The numbers that changed at a spot; none if anything else did."""
    if old is None or new is None or isinstance(new.holder, types.MappingProxyType):  # of a class, which is read-only
        return []
    if isinstance(new.value, tuple) and isinstance(new.holder, types.CellType):  # a function is known by its cells
        return []
    was, now = old.value, new.value
    found: list[tuple[int | None, Any, Any]] = [(None, was, now)]
    if type(was) is type(now) is tuple and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        found = [(i, a, b) for i, (a, b) in pairs if not _stays(a, b)]
    return [NumberPlace(key, i) for i, *_ in found] if all(type(a) is type(b) in DTYPES for _, a, b in found) else []


def _stays(old: Any, new: Any) -> bool:
    """Whether an item of a tuple is the same, or a tensor, which has a spot of its own."""
    if isinstance(old, PLAIN):
        return type(old) is type(new) and bool(old == new)
    return old is new or (isinstance(old, Tensor) and isinstance(new, Tensor))


class Scalars:
    """Puts stand-ins in the places of numbers, for as long as the context lasts."""

    def __init__(self, wanted: Mapping[NumberPlace, Spot]) -> None:
        self.wanted = wanted
        self.misuse = Misuse()
        self.put: set[NumberPlace] = set()
        self._kept: list[tuple[Spot, Any]] = []

    def __enter__(self) -> Scalars:
        self.misuse.is_open = True
        spots = {(id(spot.holder), spot.key): spot for spot in self.wanted.values()}
        for at, spot in spots.items():
            try:
                value = spot.read()
            except GONE:
                continue
            put: set[NumberPlace] = set()
            filled = value
            for place in (place for place, spot in self.wanted.items() if (id(spot.holder), spot.key) == at):
                number = place.number(value)
                if number is not None:
                    put.add(place)
                    filled = place.replaced(filled, Scalar.of_place(place, number, self.misuse))
            with suppress(AttributeError, TypeError):  # nobody can write there
                spot.put(filled)
                self._kept.append((spot, value))
                self.put |= put
        return self

    def __exit__(self, *error: Any) -> None:
        self.misuse.is_open = False
        while self._kept:
            spot, value = self._kept.pop()
            spot.put(value)

    def found(self, index: Mapping[SpotKey, Spot]) -> frozenset[NumberPlace]:
        """The places of numbers that a step read, by what its spots are called."""
        keys = {(id(spot.holder), spot.key): key for key, spot in index.items()}
        where = {place: keys.get((id(spot.holder), spot.key)) for place, spot in self.wanted.items()}
        return frozenset(place for place in self.put if where[place] == place.key)

    def numbers(self, constants: Mapping[str, Tensor]) -> dict[str, Number]:
        """The constants of a program that are numbers, with how they are computed."""
        of = self.misuse.arithmetic.numbers()
        return {name: of[id(tensor)] for name, tensor in constants.items() if id(tensor) in of}

    def check(self, constants: Mapping[str, Tensor], known: frozenset[NumberPlace], results: tuple[Any, ...]) -> None:
        """Raise CaptureError for a number that a capture used in a way that later steps would not follow."""
        for leaf in results:
            if type(leaf) is Scalar:
                leaf.refuse("is returned")
        for place in (place for number in self.numbers(constants).values() for place in number.places):
            if place not in known:
                self.misuse.reasons[place] = "is read where it cannot be found again"
        for why in self.misuse.reasons.values():
            raise CaptureError(f"a number {why}.")
