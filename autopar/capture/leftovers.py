"""What the model keeps of a capture outside of itself: in tables of `functools.lru_cache`, globals, classes, closures.

A capture computes with tensors that have no data. One that the model keeps, for the next time or as a log, would be
found there by the user's own code, or by the next capture. So the trace forgets its tensors, and those that live on are
the user's: what hangs on no input (a table of angles) is given its data in place, all else refuses to be used.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from autopar.capture.captured import Captured
from autopar.capture.data.known_values import Values, leaves, mapped
from autopar.capture.python.left_behind import LeftBehind, outlives
from autopar.errors import CaptureError
from autopar.torch_compat import FakeTensor, fill_in, on_data

Tensor = torch.Tensor
Dtypes = tuple[torch.dtype, torch.dtype] | None  # captured in, and without that
_DEPTH = 4  # of containers in tables
_LARGE = 1 << 24  # elements of tensors that are given data though nobody may keep them: those that an error holds


@dataclass(frozen=True, slots=True)
class _Token:
    """Stands for a tensor of the capture, which nothing here holds."""

    key: int


@dataclass(frozen=True, slots=True)
class _Recipe:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    written: frozenset[int]


def settled(capture: Callable[[], Captured], left: Leftovers, lift: torch.dtype | None) -> Captured:
    """What a capture gives; made once more where the model kept tables of its own, which are its constants then.

    lift: the dtype in which it computes, if not the model's own."""
    dtypes = None if lift is None else (lift, torch.get_default_dtype())
    try:
        made = capture()
    except BaseException as error:
        filled, _ = left.settle(dtypes, is_over=False)
        again = _again(capture, left, dtypes) if filled and isinstance(error, CaptureError) else None
        if again is None:
            raise
        made = again
    filled, others = left.settle(dtypes, is_over=True)
    if filled:
        made = capture()
        others += sum(left.settle(dtypes, is_over=True))
    if others:
        note = f"{others} tensor{'s' * (others > 1)} of the captured step {_KEPT}"
        made = replace(made, program=made.program.with_(notes=(*made.program.notes, note)))
    return made


def _again(capture: Callable[[], Captured], left: Leftovers, dtypes: Dtypes) -> Captured | None:
    """Capture once more what failed while the model made tables, which are there now: a number that it read of one as
    it made that was none of a batch, and is not read again. None if it fails again: the first error says why."""
    try:
        return capture()
    except CaptureError:
        left.settle(dtypes, is_over=False)
        return None


_KEPT = (
    "kept by the model outside of itself (in a list, a global, an object) without data: compiled steps run no Python, "
    "and keep nothing there. To read a value of each step, return it beside the loss (model.last_aux)"
)


@dataclass(slots=True)
class Leftovers:
    """The tensors of the runs of a capture, none of which is held here: each by a number of its own, for an id may be
    that of another tensor in a later run."""

    refs: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    recipes: list[_Recipe] = field(default_factory=list)  # calls that are still to be run on data, in their order
    known: dict[int, Tensor] = field(default_factory=dict)  # data before those calls, the user's own among it
    free: set[int] = field(default_factory=set)  # those that hang on no input
    _numbers: dict[int, int] = field(default_factory=dict)  # by id

    def dismiss(self, values: Sequence[Values], graphs: Iterable[torch.fx.Graph]) -> None:
        """Take over what is known of the tensors of some runs, in their order, which then know nothing any more.
        graphs: of their ops, whose nodes have the tensors that they made."""
        for graph in graphs:
            for node in graph.nodes:
                self._note(node.meta.pop("val", None))
        found = [each.dismiss() for each in values]
        for each in (each for known, _ in found for each in known):
            self._note(each.tensor)
            data = each.value if each.value is not None else each.original
            if each.kinds == 0:
                self.free.add(self._number(each.tensor))
            if each.kinds == 0 and data is not None:
                self.known[self._number(each.tensor)] = data.detach()
        for call in (call for _, calls in found for call in calls):
            results, written = (tuple(map(self._number, tensors)) for tensors in (call.results, call.written))
            function, args, kwargs = call.asked or (call.function, call.args, call.kwargs)
            self.recipes.append(_Recipe(function, self._told(args), self._told(kwargs), results, frozenset(written)))

    def _note(self, value: Any) -> None:
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, FakeTensor):
                self._number(tensor)

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor), -1)
        if number < 0 or self.refs[number]() is not tensor:
            number = self._numbers[id(tensor)] = len(self.refs)
            self.refs[number] = weakref.ref(tensor)
        return number

    def _told(self, value: Any) -> Any:
        """Arguments with tokens for tensors without data."""
        return _Token(self._number(value)) if isinstance(value, FakeTensor) else mapped(self._told, value)

    def settle(self, dtypes: tuple[torch.dtype, torch.dtype] | None, is_over: bool) -> tuple[int, int]:
        """Give data to what lives on, and take what has none out of use; how many there are of each.

        dtypes: the one that floating-point tensors were captured in, and that which they have without it. is_over:
        no error holds tensors of the capture, so that whatever lives on is kept by the user.
        """
        if is_over and not outlives(lambda: bool(self._living())):
            return 0, 0
        living = self._living()
        kept = {key: tensor for key, tensor in living.items() if key in self.free}
        if not is_over:
            kept = kept if sum(tensor.numel() for tensor in kept.values()) <= _LARGE else {}
        data = self._data_of(kept)
        for key, value in self._in_own_dtype(data, kept, dtypes).items():
            fill_in(kept[key], value.clone())
        others = [tensor for key, tensor in living.items() if key not in data] if is_over else []
        for tensor in others:
            fill_in(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), LeftBehind)
        return len(data), len(others)

    def _in_own_dtype(
        self, data: dict[int, Tensor], kept: Mapping[int, Tensor], dtypes: tuple[torch.dtype, torch.dtype] | None
    ) -> dict[int, Tensor]:
        """The data as the model would have it that is not run in another dtype: what took that from its operands."""
        other = {key for key, value in data.items() if dtypes is not None and value.dtype == dtypes[0] != dtypes[1]}
        if dtypes is not None and other:
            other -= _in_tables({id(kept[key]): kept[key] for key in other})
            return {key: value.to(dtypes[1]) if key in other else value for key, value in data.items()}
        return data

    def _living(self) -> dict[int, Tensor]:
        found = {key: ref() for key, ref in self.refs.items()}
        return {key: tensor for key, tensor in found.items() if tensor is not None and type(tensor) is FakeTensor}

    def _data_of(self, wanted: Iterable[int]) -> dict[int, Tensor]:
        """The values of tensors, as far as calls give them that hang on no input."""
        needed, calls = set(wanted), list[_Recipe]()
        for recipe in reversed(self.recipes if needed else []):
            if not needed.isdisjoint(recipe.results) or not needed.isdisjoint(recipe.written):
                calls.append(recipe)
                needed.update(_tokens_in((recipe.args, recipe.kwargs)))
        values = {key: self.known[key].clone() for key in needed if key in self.known}  # which calls may write
        for recipe in reversed(calls):
            _run(recipe, values)
        return {key: values[key] for key in wanted if key in values}


def _run(recipe: _Recipe, values: dict[int, Tensor]) -> None:
    """Run a call on data, and add what it gives; what has no data stays so."""

    def given(value: Any) -> Any:
        return values[value.key] if isinstance(value, _Token) else mapped(given, value)

    state = torch.default_generator.get_state()
    try:
        with on_data():
            result = recipe.function(*given(recipe.args), **given(recipe.kwargs))
    except Exception:  # what a capture could not know either
        return
    finally:
        torch.default_generator.set_state(state)
    made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
    if len(made) == len(recipe.results):
        values.update(zip(recipe.results, made, strict=True))


def _in_tables(wanted: Mapping[int, Tensor]) -> set[int]:
    """Find the tensors, by their ids, that stand in tables of `functools.lru_cache`, whose keys may well say the
    dtype."""
    kind, found = type(cache(len)), set[int]()
    for table in [item for item in gc.get_objects() if type(item) is kind]:
        inside: list[Any] = gc.get_referents(table)
        for _ in range(_DEPTH):
            found.update(id(item) for item in inside if id(item) in wanted)
            inside = [x for item in inside if isinstance(item, (dict, tuple, list)) for x in gc.get_referents(item)]
    return found


def _tokens_in(value: Any) -> set[int]:
    return {leaf.key for leaf in leaves(value) if isinstance(leaf, _Token)}
