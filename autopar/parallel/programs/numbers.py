"""Count the changes of Python numbers: from the second on a number is an input of the programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from autopar.capture.python.guards import Change
from autopar.capture.python.scalars import NumberPlace, Scalars, places_of
from autopar.capture.python.spots import Spot
from autopar.errors import AutoparError

_log = logging.getLogger("autopar")
_CHANGES = 2  # of a number, after which it is expected to change again
T = TypeVar("T")


@dataclass(slots=True)
class ChangingNumbers:
    """Counts how often a number changed. Which of them are inputs, and why others cannot be."""

    inputs: dict[NumberPlace, Spot] = field(default_factory=dict)
    refused: dict[NumberPlace, str] = field(default_factory=dict)
    _changed: dict[NumberPlace, int] = field(default_factory=dict)
    _new: list[NumberPlace] = field(default_factory=list)

    def saw(self, changes: Sequence[Change]) -> None:
        """Count the changes for which no program is known."""
        for change in changes:
            for place in places_of(change.key, change.old, change.new):
                self._changed[place] = self._changed.get(place, 0) + 1
                if self._changed[place] >= _CHANGES and place not in self.refused and change.new is not None:
                    if place not in self.inputs:
                        self._new.append(place)
                    self.inputs[place] = change.new

    def build(self, make: Callable[[Scalars], T], is_able: bool) -> T:
        """What `make` gives with these inputs, or without those for which it fails. is_able: values of tensors are not
        read, which may be computed of such numbers."""
        if not is_able:
            for place in list(self.inputs):
                self._refuse(place, "may be part of what specialize=True reads")
        while True:
            scalars = Scalars(self.inputs)
            try:
                made = make(scalars)
            except AutoparError as error:
                if not scalars.put:
                    raise
                blamed = [place for place in scalars.misuse.reasons if place in self.inputs] or self._new or self.inputs
                for place in list(blamed):
                    self._refuse(place, scalars.misuse.reasons.get(place) or str(error).split("\n")[0])
            else:
                for place in self._new:
                    _note(f"{self.inputs[place]} changed twice: it is an input of the program from now on")
                self._new.clear()
                return made

    def _refuse(self, place: NumberPlace, why: str) -> None:
        spot = self.inputs.pop(place)
        self.refused[place] = why
        if place in self._new:
            self._new.remove(place)
        _note(
            f"{spot} changed twice, but cannot be an input of the program: the number {why}. So it is compiled again "
            f"for each value. A tensor there (torch.tensor(...), filled or replaced by others) is read anew at each "
            f"step by one program: make '{spot.name}' one, or pass it with the batch"
        )


def _note(text: str) -> None:
    if dist.get_rank() == 0:
        _log.warning("%s", text)
