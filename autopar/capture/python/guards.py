"""Guards: the attributes, globals, closures and hooks that a captured step read, and what has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, starmap
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.leaves import text_of
from autopar.capture.inputs.shared_memory import overlapping
from autopar.capture.python.library_state import Entries
from autopar.capture.python.ran import Ran
from autopar.capture.python.scalars import GONE, NumberPlace, Scalars
from autopar.capture.python.spots import (
    BY_ITEM,
    LONG,
    NAMESPACES,
    PLAIN,
    Numbers,
    Spot,
    SpotKey,
    SpotWalk,
    hook_tables,
    is_library,
    torch_state,
)
from autopar.torch_compat import global_module_hooks, no_torch_function, storage_of

_GONE = "nothing"
_CODE = attrgetter("__code__")


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is not as it was; `old` or `new` is None where there was or is none."""

    old: Spot | None
    new: Spot | None
    key: SpotKey

    def __str__(self) -> str:
        spot, was, now = self.old or self.new, _shown(self.old), _shown(self.new)
        if was == now and isinstance(self.new and self.new.value, torch.Tensor):
            return f"{spot} is {now}, of another form or in other memory than before"
        return f"{spot} was {was} and is {now}"

    @property
    def line(self) -> str:
        """What it is now, as ranks compare it."""
        return f"{self.old or self.new} = {_shown(self.new)}"


class Guards:
    """The values that a step read, found from a model, its loss function and the functions that ran.

    What torch and Python's library own is not looked into. Values are compared by identity first: a container whose
    insides are all the same is the same, and a tensor of the same form is read anew by the program. So are numbers
    that are inputs of it (`places`), of which only the type counts. `given`: the numbers among the arguments of the
    call at hand, and what its tensors carry, which the caller keeps up to date.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, ran: Ran, scalars: Scalars | None = None,
        given: Numbers | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.ran = model, loss_fn, ran
        self.given: Numbers = {} if given is None else given
        self.places: frozenset[NumberPlace] = frozenset()
        for table in global_module_hooks() + tuple(t for m in tables.modules(model) for t in hook_tables(m)):
            for hook in table.values():
                ran.add(hook)
        ran.add_backward()
        walk = self._walk()
        if scalars is not None:
            self.places = scalars.found(_by_name(walk.spots))
        self._anchor(walk)

    @property
    def notes(self) -> list[str]:
        """On what is read, but not looked at before each step: one for each line that reads it, and for each of the
        model's own."""
        alike: dict[str, list[str]] = {}
        for name, where in self._unseen.items():
            alike.setdefault(where or name, []).append(name)
        return [
            f"{names[0]}{f' and {len(names) - 1} others like it' * bool(names[1:])}{f', {key},' * (key != names[0])} "
            f"{'are' if names[1:] else 'is'} read at the capture alone: changes inside of "
            f"{'them' if names[1:] else 'it'} are not seen. Keep what changes in an attribute of the model, a list or "
            f"dict of its own, or a tensor"
            for key, names in alike.items()
        ]

    def sizes(self, without: Any) -> tuple[int, ...]:
        """The sizes of the containers that were looked into, in their order, but for one."""
        return tuple(len(one) for one in self._sized if one is not without)

    def spots_of(self, tensor: torch.Tensor) -> list[SpotKey]:
        """Where a tensor was read."""
        return [key for key, spot in self.index.items() if spot.value is tensor]

    def holds(self) -> bool:
        """True if nothing has changed."""
        return self._is_given() and (self._is_untouched() or not self.changes())

    def changes(self) -> list[Change]:
        """What has changed. Where nothing has, equal values in other objects are those to look at from now on."""
        walk = self._walk()
        old, new = self.index, _by_name(walk.spots)
        parted = {key for pair in self._shared ^ _shared(new) for key in pair}
        parted |= {key for key, was in self._forms.items() if key in new and _is_reformed(new[key].value, was)}
        changes = [
            Change(spot, new.get(key), key)
            for key, spot in old.items()
            if key in parted or not self._same(key, spot, new.get(key))
        ]
        changes += [Change(None, spot, key) for key, spot in new.items() if key not in old]
        if not changes:
            self._anchor(walk)
        return changes

    def _is_given(self) -> bool:
        """The arguments have the same numbers: looked at first, as they may well be others at each call."""
        return all(_equal(self._fixed(key, self.given.get(at, _GONE)), was) for key, at, was in self._numbers)

    def _walk(self) -> SpotWalk:
        walk = SpotWalk(self.ran)
        walk.given(self.given)
        walk.model(self.model)
        walk.function(self.loss_fn)
        for root in self.ran.globals():
            walk.root(root)
        for tensor in self.ran.values:
            walk.value(tensor)
        walk.libraries()
        return walk

    def _anchor(self, walk: SpotWalk) -> None:
        read = {id(tensor) for tensor in self.ran.values}
        self.spots = [replace(spot, exact=True) if id(spot.value) in read else spot for spot in walk.spots]
        self.index = _by_name(self.spots)
        self._shared = _shared(self.index)
        self._forms = {key: form(spot.value) for key, spot in _plain(self.index)}
        self._tensors = [spot.value for _, spot in _plain(self.index)]
        self._memory = _memory_of(self._tensors)
        inputs = {place.key for place in self.places}
        self._inputs = [(key, spot, self._fixed(key, spot.value)) for key, spot in self.index.items() if key in inputs]
        self._numbers = [
            (key, spot.key, self._fixed(key, spot.value))
            for key, spot in self.index.items()
            if spot.holder is self.given
        ]
        self._unseen = walk.unseen
        self._sized, self._sizes = walk.sized, list(map(len, walk.sized))
        self._empty = walk.empty
        self._contents = walk.contents
        self._objects, self._kinds = walk.objects, list(map(type, walk.objects))
        self._functions, self._codes = walk.functions, list(map(_CODE, walk.functions))
        self.torch_state = torch_state()
        by_holder: dict[int, list[SpotKey]] = {}
        for key, spot in self.index.items():
            if key not in inputs:
                by_holder.setdefault(id(spot.holder), []).append(key)
        groups = [[keys[0], *keys] for keys in by_holder.values()]  # two at least, of which a getter makes a tuple
        self._getters = [_getter([self.index[key] for key in keys]) for keys in groups]
        self._places = [key for keys in groups for key in keys]
        self._kept = [self.index[key].value for key in self._places]

    def _is_untouched(self) -> bool:
        """Every object is the very one that it was: the common case, in C."""
        try:
            return (
                not any(self._empty)
                and self.torch_state == torch_state()
                and list(map(len, self._sized)) == self._sizes
                and ((all(map(is_, self._now(), self._kept)) and self._lie_as_before()) or self._are_bound_anew())
                and all(read() == was for read, was in self._contents)
                and list(map(type, self._objects)) == self._kinds
                and list(map(_CODE, self._functions)) == self._codes
                and all(_equal(self._fixed(key, spot.read()), was, exact=True) for key, spot, was in self._inputs)
            )
        except GONE:
            return False

    def _now(self) -> Iterator[Any]:
        """What stands in the places that were looked at, in the order of what was kept of them."""
        return chain.from_iterable(starmap(call, self._getters))

    def _lie_as_before(self) -> bool:
        """True if tensors have the memory that they had: `mean.data = ...` leaves the object what it is."""
        return _memory_of(self._tensors) == self._memory

    def _are_bound_anew(self) -> bool:
        """True if all that differs is tensors of the form that they had, and what they share with others is what it
        was: those that a step binds to its buffers, or to other memory. They are the ones to look at from now on."""
        now, index = list(self._now()), dict(self.index)
        others = (
            (key, value) for key, value, was in zip(self._places, now, self._kept, strict=True) if value is not was
        )
        for key, value in others:
            spot = index[key]
            if not isinstance(value, torch.Tensor) or not _equal(spot.value, value, spot.exact):
                return False
            index[key] = replace(spot, value=value)
        plain = list(_plain(index))
        tensors = [spot.value for _, spot in plain]
        memory = _memory_of(tensors)
        moved = (key for (key, _), *lies in zip(plain, *memory, *self._memory, strict=False) if lies[:2] != lies[2:])
        if len(tensors) != len(self._tensors) or _shared(index) != self._shared:
            return False
        if any(_is_reformed(index[key].value, self._forms.get(key)) for key in moved):
            return False
        self.index, self._kept = index, now
        self._tensors, self._memory = tensors, memory
        return True

    def _same(self, key: SpotKey, old: Spot, new: Spot | None) -> bool:
        return new is not None and _equal(self._fixed(key, old.value), self._fixed(key, new.value), old.exact)

    def _fixed(self, key: SpotKey, value: Any) -> Any:
        """What must stay of a value: of numbers that are inputs, their type."""
        for place in self.places:
            if place.key == key and place.number(value) is not None:
                value = place.replaced(value, type(place.number(value)))
        return value


def _getter(spots: Sequence[Spot]) -> tuple[Callable[[Any], Any], Any]:
    """How to read all spots of one holder at once."""
    holder, keys = spots[0].holder, [spot.key for spot in spots]
    return (itemgetter(*keys) if isinstance(holder, BY_ITEM) else attrgetter(*keys)), holder


def _by_name(spots: Sequence[Spot]) -> dict[SpotKey, Spot]:
    """Several of one name, of functions that share their code, by their order."""
    found: dict[SpotKey, Spot] = {}
    count: dict[tuple[str, str], int] = {}
    for spot in spots:
        key = spot.name, spot.where
        found[*key, count.setdefault(key, 0)] = spot
        count[key] += 1
    return found


def _shared(index: dict[SpotKey, Spot]) -> frozenset[tuple[SpotKey, SpotKey]]:
    """Which tensors have elements in common: one of two that is bound to memory of its own is a tensor of its own, and
    a write to one of two that came to share theirs is seen in the other."""
    plain = ((key, spot.value) for key, spot in _plain(index))
    return frozenset((one, other) for (one, _), (other, _) in overlapping(plain))


def _plain(index: dict[SpotKey, Spot]) -> Iterator[tuple[SpotKey, Spot]]:
    """The spots of tensors that have a memory of this rank's."""
    tensors = ((key, spot) for key, spot in index.items() if isinstance(spot.value, torch.Tensor))
    return ((key, spot) for key, spot in tensors if _has_memory(spot.value))


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for sparse tensors, and for those that stand for others or are made of them (FakeTensor, DTensor)."""
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and storage_of(tensor) is not None


def _memory_of(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Where each tensor begins, and how many elements it has."""
    with no_torch_function():  # in C: 9 us for 100 tensors, of which shapes alone would take 7
        return list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.numel, tensors))


def _is_reformed(value: Any, was: tuple[Any, ...] | None) -> bool:
    return isinstance(value, torch.Tensor) and form(value) != was


def _equal(a: Any, b: Any, exact: bool = False) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return not exact and form(a) == form(b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_equal(x, y, exact) for x, y in zip(a, b, strict=True))
    if isinstance(a, Entries):
        return a.are_in(b)
    if isinstance(a, (frozenset, *PLAIN)):
        return bool(a == b) or (a != a and b != b)
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    if isinstance(a, set):
        return a == b
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.size <= LONG and bool((a == b).all())
    if isinstance(a, (type, ModuleType, FunctionType, nn.Module, BuiltinFunctionType)):
        return False
    # Objects of the user's with the same insides, which are spots of their own.
    return isinstance(a, (list, dict, *NAMESPACES)) or not is_library(type(a).__module__)


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a program is compiled for."""
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def _shown(spot: Spot | None) -> str:
    value = _GONE if spot is None else spot.value
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (FunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, (tuple, list, dict, set, frozenset, *PLAIN)):
        return f"another {type(value).__name__}"
    text = text_of(value) if spot is not None else _GONE
    return text if len(text) <= 80 else text[:77] + "..."
