"""Record the torch calls of one run of the model, so that two runs can be compared.

A call's key is made of its function, its numbers and the keys of its tensors; a key says whether the batch, a weight
or a buffer is behind it. What is made of constants alone counts only where it is used, so that a mask which the first
run makes and the next one finds in a cache is the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.location import Line
from autopar.torch_compat import OpOverload, storage_of

# What torch's machinery calls on a tensor that it takes over, in one run and not in the other.
_SAME = (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy, torch.ops.aten.detach, torch.ops.aten.alias)
_BYTES = 1 << 20  # of a numpy array: larger ones are compared by their first ones


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the batch, a weight or a buffer is behind. `numbers` are those among its arguments."""

    key: int
    function: str
    line: Line | None
    numbers: tuple[Any, ...]


_Key = tuple[Any, int, bool]  # the tensor, its key, and whether an input is behind it


class Calls:
    """The calls of one run. `earlier` is the run before it, whose tensors may turn up again."""

    def __init__(self, earlier: Calls | None = None) -> None:
        self.made: list[Call] = []
        # The tensor is held, so that its id stays its own.
        self._known: dict[int, _Key] = dict(earlier._known) if earlier else {}
        self._lying: dict[Any, _Key] = (
            dict(earlier._lying) if earlier else {}
        )  # of those with an input behind them, by their memory

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The inputs of the step."""
        for position, tensor in enumerate(tensors):
            self._enter(tensor, hash(("input", position)), True, is_new=True)

    def _enter(self, tensor: torch.Tensor, key: int, depends: bool, is_new: bool) -> None:
        """`is_new`: what its memory holds is."""
        self._known[id(tensor)] = (tensor, key, depends)
        memory = _memory_of(tensor)
        if is_new or (depends and memory not in self._lying):
            self._lying[memory] = (tensor, key, depends)

    def comes_from_input(self, tensor: Any) -> bool:
        """True unless the tensor is known to be made of constants alone."""
        known = self._known.get(id(tensor))
        return known is None or known[2]

    def saw(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, line: Line | None,
        written: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """A call with what it returned, and those of its arguments that it wrote into."""
        name = getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        results = result if isinstance(result, (tuple, list)) else (result,)
        made = [(i, item) for i, item in enumerate(results) if isinstance(item, torch.Tensor)]
        if not made and not written:
            return
        is_machinery = isinstance(function, OpOverload)  # called by torch itself, not in both runs alike
        if is_machinery and function.overloadpacket in _SAME:
            for _, item in made:
                lying = self._lying.get(_memory_of(item))
                self._known[id(item)] = (item, *(lying[1:] if lying else self._key(args[0], [])))
            return
        numbers: list[Any] = []
        key, depends = self._key((args, kwargs), numbers)
        key = hash((name or repr(function), owner, key))
        if depends and not is_machinery:
            self.made.append(Call(key, owner or name, line, tuple(numbers)))
        changed = {id(tensor) for tensor in written}
        passed = {id(arg) for arg in args} - changed  # x.to(x.device) is x
        for position, item in [*((0, tensor) for tensor in written), *made]:
            if id(item) not in passed:
                self._enter(item, hash((key, position)), depends, is_new=id(item) in changed)

    def read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: Line | None) -> None:
        """A value that was taken out of tensors that no input is behind: they must be the same in the next run."""
        numbers: list[Any] = []
        key, _ = self._key((args, kwargs), numbers)
        name = getattr(function, "__name__", "")
        self.made.append(Call(hash((name, key)), name, line, tuple(numbers)))

    def _key(self, value: Any, numbers: list[Any]) -> tuple[int, bool]:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value)) or self._lying.get(_memory_of(value))
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


def _memory_of(tensor: torch.Tensor) -> Any:
    """The same for tensors that show the same values in the same memory; another one for each tensor without any."""
    storage = storage_of(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


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
