"""What a run of the model leaves in Python (`self.mean = h.mean()`, `self.calls += 1`), for the programs that do not.

A compiled step runs no Python, so that whatever it would leave stays as it was. In the next step of the same program
nothing may hang on it (`determinism.py`). Nor may it in another program (evaluation, another size, another flag): that
one is run on shapes with what the others leave, and compared with what it does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.python.attributes import NOTHING, AttributeChange, Attributes
from autopar.capture.python.scalars import GONE
from autopar.capture.python.spots import Spot
from autopar.torch_compat import FakeTensorMode

_MODEL = "model."  # before the names of the tensors of the model itself
_FAR = 1009  # how much later a number is tried
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


class Unshown:
    """Stands for a value of a class that is not known: who uses it fails."""


@dataclass(frozen=True, slots=True)
class LeftValue:
    """What a run leaves in an attribute or item of a model, by its name; tensors are on the meta device. spot: of a
    number outside of the model, which counts up."""

    name: str
    new: Any = None
    where: str = ""  # the line that leaves it
    spot: Spot | None = None

    @property
    def has_tensors(self) -> bool:
        return bool(_tensors(self.new))

    def __str__(self) -> str:
        return f"'{self.name}'{f' ({self.where})' if self.where else ''}"


def left_values(changes: Sequence[AttributeChange], is_constant: Callable[[Any], bool]) -> list[LeftValue]:
    """Values by the changes of a run. Tables that are made of constants are the same for whoever makes them, and so is
    what is noted of them: a run that makes some leaves other tensors alone."""
    values = {change.name: change.new if change.whole is None else change.whole for change in changes}
    tensors = {name: list(_tensors(value)) for name, value in values.items()}
    tables = {name for name, found in tensors.items() if found and all(map(is_constant, found))}
    wanted = (name for name, found in tensors.items() if name not in tables and (found or not tables))
    return [LeftValue(name, _mapped(_without_data, values[name])) for name in wanted]


@dataclass(slots=True)
class LeftByOthers:
    """What the other programs of a model would leave in it, for a capture in this mode and on this device."""

    fake: FakeTensorMode
    device: torch.device
    values: Sequence[LeftValue] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)  # that were put into the model

    def put(self, attributes: Attributes, standing: frozenset[str], carried: dict[str, Any]) -> Callable[[], None]:
        """Have the model hold it; the function that is given takes back numbers outside of the model. standing: names
        of tensors that others stand in for while the model runs, which go to `carried`."""
        before = list[tuple[Spot, Any]]()
        self.tensors.clear()
        for each in self.values:
            with self.fake:
                value = _mapped(self._made, each.new)
            if each.spot is not None:
                before += [(each.spot, now) for now in _numbers_at(each.spot)]
            elif each.name in standing:
                carried[f"{_MODEL}{each.name}"] = value
            else:
                attributes.put(each.name, value)
        for spot, now in before:
            spot.put(now + _FAR)

        def put_back() -> None:
            for spot, now in before:
                spot.put(now)

        return put_back

    def _made(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self.tensors.append(torch.empty_like(value, device=self.device))
        return self.tensors[-1]


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value if value is NOTHING or isinstance(value, _PLAIN) else Unshown()


def _tensors(value: Any) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Python's own containers with other leaves."""
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)


def _numbers_at(spot: Spot) -> Iterator[Any]:
    with suppress(*GONE):
        now = spot.read()
        if type(now) in (int, float):
            yield now
