"""Copies of a module that share nothing with it.

`copy.deepcopy` takes a function for a constant. One that closes over the module, or has it as a default (a lambda that
ties a head to an embedding, a hook, a patched method), would read the original's weights from the copy: it is made anew
around the copies.
"""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.errors import CaptureError, first_sentence

_KEEPS = (
    "The model keeps a tensor that an earlier call computed, in a list or an object: give verify a model that has not "
    "run yet, or keep x.detach()."
)
_HOLDS = (
    "Give the class that cannot be copied a `__deepcopy__`, or keep what it holds (a socket, a generator, a "
    "connection) outside of the model."
)
# What Python cannot copy, and two models may share: it holds nothing of either.
_SHARED = (staticmethod, classmethod, property, ModuleType, io.IOBase, type(threading.Lock()), type(threading.RLock()))


def copied(model: nn.Module) -> nn.Module:
    """A copy of a module, of one too that keeps what a hook makes anew at each step (`torch.nn.utils.prune`,
    `weight_norm` of old): torch copies no tensor that was computed. Raises CaptureError for what cannot be copied."""
    kept = (value for module in tables.modules(model) for value in vars(module).values())
    computed = (value for value in kept if isinstance(value, torch.Tensor) and value.grad_fn is not None)
    memo: dict[int, Any] = {id(value): value.detach().clone().requires_grad_() for value in computed}
    memo |= {id(value): value for value in _shared(model, set())}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        first = first_sentence(str(error))
        raise CaptureError(
            f"verify compares with copies of the model, and copy.deepcopy of {type(model).__name__} fails: "
            f"{type(error).__name__}: {first}. {_KEEPS if 'graph leaves' in first else _HOLDS}"
        ) from error
    _Rebound(memo).run()
    return copied


def _shared(value: Any, seen: set[int]) -> Iterator[Any]:
    """What copies share of all that an object holds."""
    if isinstance(value, _SHARED):
        yield value
    elif id(value) not in seen and not isinstance(value, (torch.Tensor, type, FunctionType)):
        seen.add(id(value))
        held = getattr(value, "__dict__", value)
        parts = held.values() if isinstance(held, dict) else held if type(held) in (list, tuple, set) else ()
        for part in parts:
            yield from _shared(part, seen)


class _Rebound:
    """Makes the functions anew that the copies hold and that read an original. memo: the copies by the ids of their
    originals, as `copy.deepcopy` leaves it, with a list of the originals under its own id."""

    def __init__(self, memo: dict[int, Any]) -> None:
        # What the copies share with the originals (a module of Python) stays as it is.
        self.copies = {key: value for key, value in memo.items() if key not in (id(memo), id(value))}
        self.alive = memo  # the originals: none of their ids is given again
        self.made: dict[int, Any] = {}  # by the id of a function

    def run(self) -> None:
        """Exchange them where the copies hold them."""
        for value in list(self.copies.values()):
            if isinstance(value, (dict, list)):
                self._exchange(value)
            elif not isinstance(value, (torch.Tensor, type)) and isinstance(getattr(value, "__dict__", None), dict):
                self._exchange(vars(value))

    def _exchange(self, held: Any) -> None:
        for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            new = self._of(value) if self._reads(value, set()) else value
            if new is not value:
                held[key] = new

    def _parts(self, value: Any) -> list[Any]:
        """What a function, or a container of some, reads."""
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if type(value) is dict:
            return list(value.values())
        return list(value) if type(value) in (list, tuple, set) else []

    def _reads(self, value: Any, seen: set[int]) -> bool:
        """True for a function that reads an original, or what holds one that does."""
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(id(part) in self.copies or self._reads(part, seen) for part in self._parts(value))

    def _of(self, value: Any) -> Any:
        """What stands for a value among the copies."""
        if id(value) in self.copies:
            return self.copies[id(value)]
        if id(value) in self.made:
            return self.made[id(value)]
        if not self._reads(value, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self._of(value.__func__), self._of(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {key: self._of(item) for key, item in value.keywords.items()}
            return functools.partial(self._of(value.func), *map(self._of, value.args), **keywords)
        if type(value) is dict:
            return {key: self._of(item) for key, item in value.items()}
        return type(value)(map(self._of, value))

    def _function(self, value: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self.made[id(value)] = made  # one that reads itself reads the new one
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if _is_filled(old):
                cell.cell_contents = self._of(old.cell_contents)
        made.__defaults__ = self._of(value.__defaults__)
        made.__kwdefaults__ = self._of(value.__kwdefaults__)
        made.__qualname__, made.__module__, made.__doc__ = value.__qualname__, value.__module__, value.__doc__
        vars(made).update({key: self._of(item) for key, item in vars(value).items()})
        return made


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
