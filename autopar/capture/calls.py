"""Record the torch calls of one run of the model, so that two runs can be compared.

A call's key is made of its function, its numbers and the keys of its tensors; a key says whether the batch, a weight
or a buffer is behind it. What is made of constants alone counts only where it is used, so that a mask which the first
run makes and the next one finds in a cache is the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.location import Line
from autopar.torch_compat import OpOverload

_BYTES = 1 << 20  # of a numpy array: larger ones are compared by their first ones


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the batch, a weight or a buffer is behind. `numbers` are those among its arguments."""

    key: int
    function: str
    line: Line | None
    numbers: tuple[Any, ...]


class Calls:
    """The calls of one run. `earlier` is the run before it, whose tensors may turn up again."""

    def __init__(self, earlier: Calls | None = None) -> None:
        self.made: list[Call] = []
        # The tensor is held, so that its id stays its own.
        self._known: dict[int, tuple[Any, int, bool]] = dict(earlier._known) if earlier else {}

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The inputs of the step."""
        for position, tensor in enumerate(tensors):
            self._known[id(tensor)] = (tensor, hash(("input", position)), True)

    def comes_from_input(self, tensor: Any) -> bool:
        """True unless the tensor is known to be made of constants alone."""
        known = self._known.get(id(tensor))
        return known is None or known[2]

    def saw(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, line: Line | None) -> None:
        """A call with what it returned."""
        name = getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        results = result if isinstance(result, (tuple, list)) else (result,)
        if result is not None and not any(isinstance(item, torch.Tensor) for item in results):
            return
        numbers: list[Any] = []
        key, depends = self._key((args, kwargs), numbers)
        key = hash((name or repr(function), owner, key))
        if depends and not isinstance(function, OpOverload):  # torch's machinery calls those, not always alike
            self.made.append(Call(key, owner or name, line, tuple(numbers)))
        written = result is None or (name.endswith("_") and not name.endswith("__"))
        for position, item in enumerate(args[:1] if written else results):
            if isinstance(item, torch.Tensor):
                self._known[id(item)] = (item, hash((key, position)), depends)

    def _key(self, value: Any, numbers: list[Any]) -> tuple[int, bool]:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value))
            return (known[1], known[2]) if known else (hash((tuple(value.shape), str(value.dtype))), False)
        if isinstance(value, (tuple, list)):
            parts = [self._key(item, numbers) for item in value]
        elif isinstance(value, dict):
            parts = [self._key(item, numbers) for item in value.values()]
            parts.append((hash(tuple(value)), False))
        elif isinstance(value, slice):
            parts = [self._key(item, numbers) for item in (value.start, value.stop, value.step)]
        elif isinstance(value, np.ndarray):
            return hash(
                (value.shape, value.tobytes() if value.nbytes < _BYTES else value.ravel()[:1000].tobytes())
            ), False
        elif isinstance(value, (int, float, complex, np.generic)):
            numbers.append(value)
            return hash((type(value).__name__, repr(value))), False
        else:
            plain = isinstance(value, (str, bytes, type(None), torch.dtype, torch.device))
            return hash(repr(value) if plain else type(value).__qualname__), False
        return hash(tuple(key for key, _ in parts)), any(depends for _, depends in parts)


def first_difference(first: Calls, second: Calls) -> tuple[Call | None, Call | None] | None:
    """The first calls that are not the same, None for a run that has ended; None altogether if there are none."""
    for one, other in zip(first.made, second.made, strict=False):
        if one.key != other.key:
            return one, other
    shorter = min(len(first.made), len(second.made))
    if len(first.made) == len(second.made):
        return None
    return (
        first.made[shorter] if shorter < len(first.made) else None,
        second.made[shorter] if shorter < len(second.made) else None,
    )
