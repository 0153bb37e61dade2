"""Save the Python attributes of modules before a capture, compare them after it, and restore them."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import tables

_DEPTH = 3
_LONG = 10_000  # a longer list or dict is data, not state
_TENSORS = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module())).difference(_TENSORS)  # hooks and flags of torch's
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_OPAQUE = (*_PLAIN, type, FunctionType, MethodType, ModuleType, torch.Tensor, nn.Module, torch.dtype, torch.device)
NOTHING = object()  # of an attribute that is not there


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """An attribute or item that a run changed. `kind` is parameter, module or value. whole: the list or set that the
    name is of, if not an item's."""

    name: str
    kind: str
    new: Any
    whole: Any = None


@dataclass(frozen=True, slots=True)
class _Kept:
    name: str
    holder: Any
    items: Any  # a copy of the insides
    is_object: bool  # whose items are attributes
    left_out: frozenset[Any] = frozenset()  # keys of what is no state


class Attributes:
    """The Python attributes of all modules of a model, with the insides of their lists, dicts and objects."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[int, _Kept] = {}
        self.hooks: list[tuple[str, dict[Any, Any], set[Any]]] = []  # with the name of each table
        self.books: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []  # of torch's modules, each with a copy
        self.modes: list[tuple[str, nn.Module, bool]] = []  # which modules train
        self.add(model)

    def add(self, model: nn.Module, prefix: str = "") -> None:
        """Remember those of another model too."""
        for path, module in tables.named_modules(model, prefix=prefix):
            values = vars(module)
            self.hooks += [(_joined(path, name), table, set(table)) for name, table in _hooks_of(module)]
            self.modes.append((_joined(path, "training"), module, module.training))
            is_of_torch = type(module).__module__.startswith("torch.nn.")
            books = {name for name, value in values.items() if is_of_torch and _is_book(name, value)}
            self.books += [(values, name, values[name], values[name].copy()) for name in books]
            own = {name: value for name, value in values.items() if name not in _OWN and name not in books}
            self.kept[id(values)] = _Kept(path, values, own, True, frozenset(books))
            for name, value in own.items():
                self._keep(_joined(path, name), value, _DEPTH)

    def _keep(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _OPAQUE) or depth == 0:
            return
        holder = value if isinstance(value, (list, dict, set)) else getattr(value, "__dict__", None)
        if not isinstance(holder, (list, dict, set)) or id(holder) in self.kept or len(holder) > _LONG:
            return
        kept = self.kept[id(holder)] = _Kept(name, holder, holder.copy(), holder is not value)
        if not isinstance(holder, set):
            for key, item in _items(holder):
                self._keep(_name(kept, key), item, depth - 1)

    def anew(self) -> Attributes:
        """Remember the same as it is now."""
        found = copy(self)
        found.kept = {key: replace(kept, items=kept.holder.copy()) for key, kept in self.kept.items()}
        found.modes = [(name, module, module.training) for name, module, _ in self.modes]
        return found

    def hooked(self) -> list[str]:
        """The paths of the modules that have backward hooks which they did not have."""
        found = [name for name, table, names in self.hooks if not names.issuperset(table)]
        return [name.rpartition(".")[0] for name in found if "backward" in name]

    def changes(self) -> list[AttributeChange]:
        """What is not as it was."""
        modes = [
            AttributeChange(name, "value", not mode) for name, module, mode in self.modes if module.training != mode
        ]
        return [*modes, *(change for kept in self.kept.values() for change in _changes(kept))]

    def watch(self, name: str) -> Callable[[], bool]:
        """Whether one attribute or item is not as it was: asked at each line of a run, when all of them would take too
        long."""
        near = [kept for kept in self.kept.values() if name.startswith(_owner(kept))]
        modes = [(module, mode) for path, module, mode in self.modes if path == name]

        def is_changed() -> bool:
            return any(module.training != mode for module, mode in modes) or any(
                found.name == name for kept in near for found in _changes(kept, name)
            )

        return is_changed

    def put(self, name: str, value: Any) -> None:
        """Have what a change names hold another value, as far as it is known; `restore` takes it back."""
        for kept in self.kept.values():
            if isinstance(kept.holder, dict):
                key = _key(kept, name)
                if key is NOTHING:
                    continue
                if value is NOTHING:
                    kept.holder.pop(key, None)
                elif not isinstance(kept.holder.get(key), (list, set)):  # which is there by its own name
                    kept.holder[key] = value
            elif kept.name == name and type(value) is type(kept.holder):
                kept.holder.clear()
                (kept.holder.extend if isinstance(kept.holder, list) else kept.holder.update)(value)

    def restore(self) -> None:
        """Put everything back. Hooks too: a flag that says they are in place and the hooks go together."""
        for _, table, names in self.hooks:
            for name in set(table) - names:
                del table[name]
        for _, module, mode in self.modes:
            if module.training != mode:
                module.training = mode
        for values, name, book, items in self.books:
            book[:] = items
            values[name] = book
        for kept in self.kept.values():
            if not any(True for _ in _changes(kept)):
                continue
            if isinstance(kept.holder, list):
                kept.holder[:] = kept.items
            elif isinstance(kept.holder, set):
                kept.holder.clear()
                kept.holder.update(kept.items)
            else:
                ours = _OWN | kept.left_out
                for key in [key for key in kept.holder if key not in kept.items and key not in ours]:
                    del kept.holder[key]
                kept.holder.update(kept.items)


def _is_book(name: str, value: Any) -> bool:
    """True for a list that a module of torch's keeps for itself (an RNN's _flat_weights): it is no state."""
    return type(value) is list and name.startswith("_")


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """The tables of hooks that torch keeps in a module, with their names."""
    return ((name, value) for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict))


def _owner(kept: _Kept) -> str:
    """What the names of all changes of these insides begin with."""
    base, _, last = kept.name.rpartition(".")
    return base if last in _TENSORS else kept.name


def _changes(kept: _Kept, name: str | None = None) -> Iterator[AttributeChange]:
    """What is not as it was. name: of the one that is asked for; others may be left out."""
    if isinstance(kept.holder, set):
        if kept.holder != kept.items:
            yield AttributeChange(kept.name, "value", kept.holder, kept.holder.copy())
        return
    base, _, last = kept.name.rpartition(".")
    kind = {"_parameters": "parameter", "_modules": "module", "_buffers": "buffer"}.get(last, "value")
    old, new = (held if isinstance(held, dict) else dict(enumerate(held)) for held in (kept.items, kept.holder))
    is_told = name is not None and (kept.is_object or kind != "value")
    keys: Iterable[Any] = (str(name).rpartition(".")[2],) if is_told else {**old, **new}
    for key in keys:
        before, after = old.get(key, NOTHING), new.get(key, NOTHING)
        if key in _OWN or key in kept.left_out or before is after or _equal(before, after):
            continue
        if kind != "value":
            yield AttributeChange(_joined(base, key), kind, after)
        elif isinstance(kept.holder, list):
            yield AttributeChange(kept.name, kind, after, kept.holder.copy())
        else:
            yield AttributeChange(_name(kept, key), kind, after)


def _name(kept: _Kept, key: Any) -> str:
    return _joined(kept.name, key) if kept.is_object else f"{kept.name}[{key!r}]"


def _key(kept: _Kept, name: str) -> Any:
    """Find the key of an attribute or item by its name; NOTHING if it is not of these insides."""
    if kept.is_object:
        owner, _, key = name.rpartition(".")
        return key if owner == kept.name and key not in kept.left_out else NOTHING
    start = f"{kept.name}["
    if name.startswith(start) and name.endswith("]"):
        with suppress(ValueError, SyntaxError):
            return literal_eval(name.removeprefix(start)[:-1])
    return NOTHING


def _equal(before: Any, after: Any) -> bool:
    return type(before) is type(after) and issubclass(type(before), _PLAIN) and before == after


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    return iter(holder.items()) if isinstance(holder, dict) else enumerate(holder)


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
