"""Views at a place that a tensor holds: `x[i]`, `x[start : start + 8]`, rows that counts cut.

torch reads the place and gives a view. A program looks the place up, and what it finds is a copy. Copy and original are
kept alike here: what is written into a copy goes into its original at once, and a copy whose original was written is
looked up again before it is used. Both are calls like the model's own, so that gradients follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.refusals.constructs import FORM_IN_PLACE, STRIDES_OF_VIEW
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.ops.ops import op
from autopar.torch_compat import storage_of

Tensor = torch.Tensor
Run = Callable[..., Any]  # a call of the model's: the function with its arguments
Origin = tuple[tuple[Any, ...], int]  # which integer a tensor was made of, and how much was added

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_ADD = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_SUBTRACT = (Tensor.sub, Tensor.__sub__, torch.sub)
_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_SELECTED = {torch.select: ("dim", "index"), Tensor.select: ("dim", "index"),
             torch.narrow: ("dim", "start", "length"), Tensor.narrow: ("dim", "start", "length")}  # fmt: skip
STRIDED = (torch.as_strided, Tensor.as_strided, Tensor.as_strided_)
PLACED = frozenset((*_INDEXED, *_SELECTED))  # functions that are given a place


@dataclass(frozen=True, slots=True)
class _Rows:
    """So many rows from a place on, which counts from the end where it is below zero."""

    start: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a dim is looked up. rows: [n]. is_one: the dim is gone, as of an index."""

    dim: int
    rows: Tensor
    is_one: bool


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A copy of a part of something. read: gives what the original has there now; write: puts the copy there.
    has_grads: whether gradients were on, for a view then has those of its original, wherever it is used."""

    made: Tensor
    read: Callable[[Run], Tensor]
    write: Callable[[Run], Any]
    shape: torch.Size  # of `made`, which a call in place must not change
    has_grads: bool

    def check(self) -> None:
        """Raise CaptureError where the copy took another form."""
        if self.made.shape != self.shape:
            raise refusal(FORM_IN_PLACE, user_frame(sys._getframe(1)))


@dataclass(slots=True)
class ComputedViews:
    """The computed views of one run."""

    _of: dict[int, list[_View]] = field(default_factory=dict)  # by the memory of the original
    _made: dict[int, _View] = field(default_factory=dict)  # by their own memory
    _stale: dict[int, _View] = field(default_factory=dict)
    _busy: list[_View] = field(default_factory=list)  # those that are read or written right now

    def note(self, base: Tensor, made: Tensor, read: Callable[[Run], Tensor], write: Callable[[Run], Any]) -> None:
        """Keep a copy of a part of `base` alike with it. read, write: as of `_View`."""
        memory, own = storage_of(base), storage_of(made)
        if memory is not None and own is not None:  # else they are of a transform, where nothing is written in place
            self._made[own] = _View(made, read, write, made.shape, torch.is_grad_enabled())
            self._of.setdefault(memory, []).append(self._made[own])

    def copied(self, run: Run, x: Tensor) -> Tensor:
        """A copy of what torch would give itself, kept alike with it."""

        def copy(run: Run) -> Tensor:
            made: Tensor = run(Tensor.to, x, x.dtype, copy=True)
            return made

        made = copy(run)
        self.note(x, made, copy, lambda run: run(Tensor.copy_, x, made))
        return made

    @property
    def are_stale(self) -> bool:
        return bool(self._stale)

    def refresh(self, run: Run, tensors: Iterable[Tensor]) -> None:
        """Look those up again that a call is about to see, and whose original was written."""
        for memory in dict.fromkeys(map(storage_of, tensors)):
            view = None if memory is None else self._stale.get(memory)
            if view is not None and memory is not None and view not in self._busy:
                view.check()
                self._busy.append(view)
                with torch.set_grad_enabled(view.has_grads):
                    run(Tensor.copy_, view.made, view.read(run))
                self._busy.pop()
                self._stale.pop(memory, None)

    def copies(self, tensor: Tensor) -> list[Tensor]:
        """Find those that stand for views of a tensor, and of these."""
        found = list[Tensor]()
        for view in self._of.get(storage_of(tensor) or -1, ()):
            found += [view.made, *self.copies(view.made)]
        return found

    def check_strides(self, tensors: Iterable[Tensor]) -> None:
        """Raise CaptureError for a copy, which lies in other memory than a view, with other strides."""
        if any(storage_of(tensor) in self._made for tensor in tensors):
            raise refusal(STRIDES_OF_VIEW, user_frame(sys._getframe(1)))

    def wrote(self, run: Run, tensors: Iterable[Tensor]) -> None:
        """Follow a call that wrote into some tensors."""
        for memory in dict.fromkeys(map(storage_of, tensors)) if self._made else ():
            if memory is None:
                continue
            self._age(memory)
            view = self._made.get(memory)
            if view is not None and view not in self._busy:
                view.check()
                self._busy.append(view)
                view.write(run)
                self._busy.pop()
                self._stale.pop(memory, None)

    def _age(self, memory: int) -> None:
        """Mark what shows this memory as stale, and what shows that."""
        for view in self._of.get(memory, ()):
            own = storage_of(view.made)
            if own is not None and view not in self._busy and own not in self._stale:
                self._stale[own] = view
                self._age(own)

    def call(self, run: Run, function: Any, args: Any, kwargs: Any, is_drawn: Callable[[Tensor], bool]) -> Any:
        """What `x[..]` gives, or `x[..] = value` does, where tensors of one integer say the place; NotImplemented for
        another call. is_drawn: random numbers alone decide a tensor."""
        items = _items(args[0], _key(function, args, kwargs)) if function in PLACED else None
        if items is None:
            return NotImplemented
        x, value = args[0], args[2:] if function is Tensor.__setitem__ else ()
        plain = tuple(slice(None) if _is_computed(item) else item for item in items)
        if value and not getattr(value[0], "ndim", 0):
            return _fill(x[plain], items, value[0]) if isinstance(value[0], (Tensor, int, float)) else NotImplemented
        places = _places(run, x[plain].shape, items, is_drawn)
        if not isinstance(places, list):
            return places if places is NotImplemented else run(function, x, places, *value)
        made = _read(_called, x, plain, places)[-1]
        self.note(
            x, made, lambda run: _read(run, x, plain, places)[-1], lambda run: _write(run, x, plain, places, made)
        )
        return run(Tensor.__setitem__, made, Ellipsis, *value) if value else made


def _key(function: Any, args: Any, kwargs: Any) -> Any:
    """The index that says the same as the call."""
    if function in _INDEXED:
        return args[1]
    given = {**dict(zip(_SELECTED[function], args[1:], strict=False)), **kwargs}
    dim, last = given["dim"] % max(args[0].ndim, 1), given.get("index", given.get("start"))
    rows = _Rows(last, given["length"]) if "length" in given and isinstance(last, Tensor) else last
    return (*[slice(None)] * dim, rows)


def note_origin(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note what an integer was made of, where a call gave `i + 8`, or `i` of a list of them."""
    if not _is_integer(result) or kwargs or len(args) != 2:
        return
    tensor, other = args if isinstance(args[0], Tensor) else args[::-1]
    if function in (*_ADD, *_SUBTRACT) and type(other) is int and _is_integer(tensor):
        if function in _ADD or tensor is args[0]:
            made_of, before = origin(tensor)
            result.autopar_origin = made_of, before + (other if function in _ADD else -other)  # type: ignore[attr-defined]
    elif function is Tensor.__getitem__ and type(other) is int and tensor.ndim == 1:
        result.autopar_origin = (id(tensor), tensor._version, other % len(tensor)), 0  # type: ignore[attr-defined]


def origin(tensor: Tensor) -> Origin:
    """What an integer was made of, by ids of tensors that calls were given: these are held as long as the run lasts."""
    known: Origin = getattr(tensor, "autopar_origin", ((id(tensor), tensor._version), 0))
    return known


def rows_between(start: Any, stop: Any) -> int | None:
    """How many rows are between two places that tensors hold: `i` and `i + 8`; None where data decide that."""
    if not _is_integer(start) or not _is_integer(stop):
        return None
    (one, first), (other, last) = origin(start), origin(stop)
    return last - first if one == other and last > first else None


def _is_integer(value: Any) -> bool:
    """True for a tensor of one integer."""
    return isinstance(value, Tensor) and value.dtype in _INTEGERS and value.numel() == 1


def _is_computed(item: Any) -> bool:
    """True for an index, or a slice, whose place a tensor holds."""
    if type(item) is slice:
        return any(isinstance(bound, Tensor) for bound in (item.start, item.stop))
    return isinstance(item, (Tensor, _Rows))


def _items(x: Tensor, key: Any) -> list[Any] | None:
    """The items of a key, one for each dim and new dim; None for a key that is not computed, or of another kind."""
    items = list(key) if isinstance(key, tuple) else [key]
    if not all(map(_is_known, items)) or not any(map(_is_computed, items)):
        return None
    taken = sum(item is not None and item is not Ellipsis for item in items)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - taken)
    return items


def _is_known(item: Any) -> bool:
    if type(item) is slice:
        bounds = [bound for bound in (item.start, item.stop, item.step) if bound is not None]
        is_plain = all(type(bound) is int for bound in bounds)
        return is_plain or (item.step in (None, 1) and all(type(one) is int or _is_integer(one) for one in bounds))
    if type(item) is _Rows:
        return _is_integer(item.start)
    return item is None or item is Ellipsis or type(item) is int or (_is_integer(item) and not item.ndim)


def _dims(items: Sequence[Any]) -> list[tuple[int, Any]]:
    """The computed items, each with its dim behind the plain ones."""
    found, dim = list[tuple[int, Any]](), 0
    for item in items:
        if _is_computed(item):
            found.append((dim, item))
        dim += type(item) is not int
    return found


def _places(run: Run, shape: Sequence[int], items: Sequence[Any], is_drawn: Callable[[Tensor], bool]) -> Any:
    """Where the dims are looked up; NotImplemented where data decide how many rows a slice has. Of slices that are
    drawn, which torch cuts where they end outside, the key of this draw if one does. Others are checked."""
    found = list[_Place]()
    for dim, item in _dims(items):
        size = shape[dim]
        if isinstance(item, Tensor):
            found.append(_Place(dim, _from_start(item, size).reshape(1), True))
            continue
        count = item.count if type(item) is _Rows else rows_between(item.start, item.stop)
        if count is None:
            return NotImplemented
        first = item.start.reshape(())
        if type(item) is _Rows:
            first = _from_start(first, size)
        elif is_drawn(item.start) and not _is_inside(run, item.start, size - count):
            return tuple(_drawn(run, one) if type(one) is slice else one for one in items)
        rows = first + torch.arange(count, device=first.device)
        found.append(_Place(dim, op("checked_index")(rows, size, None), False))
    return found


def _from_start(place: Tensor, size: int) -> Tensor:
    return torch.where(place < 0, place + size, place)


def _is_inside(run: Run, start: Tensor, last: int) -> bool:
    """Whether a drawn place is none of those from which a slice would end outside."""
    both = run(Tensor.__and__, run(Tensor.__ge__, start, 0), run(Tensor.__le__, start, last))
    return bool(run(Tensor.__bool__, both))


def _drawn(run: Run, item: slice) -> slice:
    """A slice with the numbers of this draw."""
    bounds = (run(Tensor.__int__, one) if isinstance(one, Tensor) else one for one in (item.start, item.stop))
    return slice(*bounds)


def _called(function: Any, *args: Any) -> Any:
    return function(*args)


def _read(run: Run, x: Tensor, plain: tuple[Any, ...], places: Sequence[_Place]) -> list[Tensor]:
    """What lies there, dim by dim; the last of it is what the view shows."""
    found = [run(Tensor.__getitem__, x, plain)]
    for place in reversed(places):
        found.append(run(Tensor.index_select, found[-1], place.dim, place.rows))
    made = found[-1]
    for place in reversed(places):
        made = run(Tensor.squeeze, made, place.dim) if place.is_one else made
    return [*found, made]


def _write(run: Run, x: Tensor, plain: tuple[Any, ...], places: Sequence[_Place], made: Tensor) -> None:
    """Put a copy where it came from."""
    part, *whole = _read(run, x, plain, places)[:-1]
    made = run(Tensor.clone, made)  # the backward pass of the copy looks at it, and it may be written again
    for place in places:
        made = run(Tensor.unsqueeze, made, place.dim) if place.is_one else made
    for place, before in zip(places, [part, *whole][-2::-1], strict=True):
        rows = op("checked_index")(place.rows, before.shape[place.dim], None)
        made = run(Tensor.index_copy, before, place.dim, rows, made)
    run(Tensor.copy_, part, made)


def _fill(part: Tensor, items: Sequence[Any], value: Any) -> None:
    """Put one value wherever the place is, as torch does: of a slice what lies inside, from the end below zero."""
    inside = torch.ones((), dtype=torch.bool, device=part.device)
    for dim, item in _dims(items):
        size, at = part.shape[dim], torch.arange(part.shape[dim], device=part.device)
        if isinstance(item, Tensor):
            mine = at == op("checked_index")(item, size, None, -size) % size
        else:
            start, stop = (_bound(bound, size, default) for bound, default in ((item.start, 0), (item.stop, size)))
            mine = (at >= start) & (at < stop)
        inside = inside & mine.reshape(size, *(1 for _ in part.shape[dim + 1 :]))
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=part.dtype, device=part.device)
    part.copy_(torch.where(inside, value.to(part.dtype), part))


def _bound(bound: Any, size: int, default: int) -> Any:
    """A bound of a slice, counted from the first element."""
    if bound is None:
        return default
    if isinstance(bound, Tensor):
        return _from_start(bound.reshape(()), size)
    return bound + size if bound < 0 else bound
