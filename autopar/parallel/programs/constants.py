"""Read the tensors beside parameters, buffers and batch that a program takes, each step from where users keep them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.inputs.leaves import text_of
from autopar.capture.python.arithmetic import Number
from autopar.capture.python.guards import Guards, form
from autopar.capture.python.scalars import NumberPlace, Scalars
from autopar.capture.python.spots import Spot, SpotKey
from autopar.parallel.tensors.parameter import ParameterTensor


@dataclass(slots=True)
class Constants:
    """The tensors beside parameters, buffers and batch that a program reads: each step from where the user keeps them,
    so that another one put there is used from then on; those of no such place were made by the trace. Those of
    `numbers` are computed in Python at each step; those in parts on ranks are gathered."""

    made: Mapping[str, torch.Tensor]
    device: torch.device
    guards: Guards | None = None
    spots: Mapping[str, SpotKey] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    _seen: dict[str, _State] = field(default_factory=dict)
    _digest: str = ""
    _forms: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # of tensors of the user's, as they were captured
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)  # of this step: values of tensors in parts
    _moved: dict[str, tuple[_State, torch.Tensor]] = field(default_factory=dict)  # to where they are read

    @staticmethod
    def of(captured: Captured, guards: Guards, scalars: Scalars, device: torch.device) -> Constants:
        """Find the constants of a captured step."""
        found = {name: guards.spots_of(tensor) for name, tensor in captured.constants.items()}
        spots = {name: keys[0] for name, keys in found.items() if keys}
        made = Constants(captured.constants, device, guards, spots, scalars.numbers(captured.constants))
        for name in made._of_one_rank():  # moved to the device at once
            made[name]
        made._forms.update((name, form(made._now(name))) for name in spots)
        return made

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.numbers:  # filled in there: a copy would wait for what the device computes
            return torch.full((), self.numbers[name].value(self._read), dtype=self.made[name].dtype, device=self.device)
        tensor = self._whole[name] if name in self._whole else self._now(name)
        state, moved = self._moved.get(name, (None, tensor))
        if state is None or not _is_same({name: _state(tensor)}, {name: state}):
            moved = tensor.detach().to(self.device)
            self._moved[name] = _state(tensor), moved
        return moved

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self[name] for name in self.made]

    def gather(self) -> None:
        """Have the values of tensors in parts for the step that begins. Every rank must call this."""
        self._whole.clear()
        for name, tensor in self._in_parts():
            with torch.no_grad():
                is_whole = isinstance(tensor, ParameterTensor) and tensor.place.is_replicated
                self._whole[name] = tensor.to_local() if is_whole else tensor.full_tensor()

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take other values for constants that each step draws on the host."""
        self.made = {**self.made, **values}

    def fit(self) -> bool:
        """True if the program takes the numbers that stand in Python now."""
        alike = all(form(self._now(name)) == was for name, was in self._forms.items())
        return alike and all(number.fits(self._read) for number in self.numbers.values())

    def digest(self) -> str:
        """A text for their values, made anew when one was bound to another tensor or written in place."""
        tensors = self._of_one_rank()
        now = {name: _state(self._now(name)) for name in tensors}
        if not _is_same(now, self._seen):
            text = hashlib.sha256()
            for name in tensors:
                tensor = self._now(name)
                if tensor.device.type != "meta":
                    flat = tensor.detach().cpu().contiguous().flatten()
                    text.update(flat.view(torch.uint8).numpy().tobytes())
            self._seen, self._digest = now, text.hexdigest()[:16]
        return self._digest

    def lines(self) -> list[str]:
        """What ranks must agree on."""
        places = dict.fromkeys(place for number in self.numbers.values() for place in number.places)
        numbers = [f"{self._spot(place.key)} = {text_of(self._read(place))}" for place in places]
        written = [(self.spots.get(name, (name,))[0], tensor._version) for name, tensor in self._in_parts()]
        writes = [f"writes into '{name}', which lies in parts: {count}" for name, count in written]
        is_any = len(self.made) > len(self.numbers)
        return sorted(set(numbers)) + writes + [f"tensors beside the batch: {self.digest()}"] * is_any

    def _in_parts(self) -> Iterator[tuple[str, DTensor]]:
        """Find the tensors of which each rank has a part, or a copy, of its own."""
        for name in self.made:
            tensor: Any = self._now(name)
            if isinstance(tensor, DTensor):
                yield name, tensor

    def _of_one_rank(self) -> list[str]:
        """The names of those that each rank has whole."""
        now = ((name, self._now(name)) for name in self.made if name not in self.numbers)
        return [name for name, tensor in now if tensor is not None and not isinstance(tensor, DTensor)]

    def _now(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._spot(self.spots[name]).read() if name in self.spots else self.made[name]
        return found

    def _read(self, place: NumberPlace) -> Any:
        return place.number(self._spot(place.key).read())

    def _spot(self, key: SpotKey) -> Spot:
        assert self.guards is not None
        return self.guards.index[key]


_State = tuple[torch.Tensor, int, int]  # a tensor, how often it was written, and its memory, which `.data` exchanges


def _state(tensor: torch.Tensor) -> _State:
    return tensor, tensor._version, 0 if tensor.device.type == "meta" else tensor.data_ptr()


def _is_same(now: Mapping[str, _State], seen: Mapping[str, _State]) -> bool:
    """Whether all names have the very tensors that they had, in their memory, written to as often."""
    return now.keys() == seen.keys() and all(
        state[0] is seen[name][0] and state[1:] == seen[name][1:] for name, state in now.items()
    )
