"""Find the places in Python that a step reads, from a model, its loss function and the functions that ran."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.leaves import text_of
from autopar.capture.inputs.partners import Inlined
from autopar.capture.python.left_behind import LeftBehind
from autopar.capture.python.library_calls import (
    MACHINES,
    STATES,
    functions_called,
    is_told,
    names_of_layer,
    settings_of,
)
from autopar.capture.python.library_state import (
    MOST,
    Entries,
    Sequenced,
    attributes_read,
    content_of,
    holds_values,
    is_unseen,
    is_value_of_module,
    names_called,
)
from autopar.capture.python.ran import Ran, Root, own_roots
from autopar.torch_compat import global_module_hooks

_DEPTH = 8  # of containers and objects in each other
LONG = 1_000  # items of a list or dict that are looked at one by one; those of a longer one all at once
PLAIN = (int, float, complex, str, bytes, bool, type(None), Enum, torch.dtype, torch.device, np.generic)
_OPAQUE = (*PLAIN, torch.Tensor, FunctionType, BuiltinFunctionType)
_GIVEN_ATTRIBUTES = (FunctionType, torch.Tensor, Enum)
_TENSORS = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module()))
_WHOLE = {"vars", "__dict__", "asdict", "astuple", "fields"}  # who names these may read every attribute
_CLASSES = frozenset(("_is_param", "_is_buffer"))  # attributes of a tensor that `isinstance` reads
# With which of these names the name of a module is a text in the code.
_IMPORTERS = ({"sys", "modules"}, {"import_module"}, {"__import__"})
NAMESPACES = (types.SimpleNamespace, Namespace)
_WRAPPERS = (property, classmethod, staticmethod, functools.cached_property, functools.partial, MethodType,
             FunctionType, type(functools.cache(len)))  # fmt: skip


BY_ITEM = (dict, *Sequenced, tuple, types.MappingProxyType)  # holders whose values are read by `holder[key]`
# Among the arguments of a call: by the place among its leaves, and its name; of a tensor there the attributes that the
# user put on it, by the name of each too.
Numbers = dict[tuple[int, str] | tuple[int, str, str], Any]
SpotKey = tuple[str, str, int]  # the name and where it is read; which one, of functions that share their code


@dataclass(frozen=True, slots=True)
class Spot:
    """One value that was read: `holder[key]`, or of a cell or object its attribute `key`."""

    name: str
    where: str
    holder: Any
    key: Any
    value: Any
    exact: bool = False  # a tensor that must be this very one

    def __str__(self) -> str:
        return f"'{self.name}' ({self.where})" if self.where else f"'{self.name}'"

    def read(self) -> Any:
        """What stands there now. KeyError, IndexError, AttributeError or ValueError where nothing does."""
        return self.holder[self.key] if isinstance(self.holder, BY_ITEM) else getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Bind it to another value."""
        if isinstance(self.holder, (dict, *Sequenced)):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


class SpotWalk:
    """Collects spots. Each object is looked into once."""

    def __init__(self, ran: Ran) -> None:
        self.spots: list[Spot] = []
        self.sized: list[Any] = []  # dicts and lists, whose size counts
        self.empty: list[Any] = []  # tables of hooks without any
        self.contents: list[tuple[Callable[[], Any], Any]] = []  # of sets and arrays
        self.ran, self.names = ran, frozenset(ran.names())
        self.unseen: dict[str, str] = {}  # objects whose changes nobody sees: where each is read, by name and class
        self.seen: set[Any] = set()
        self.objects: list[Any] = []  # whose class counts
        self.functions: list[FunctionType] = []  # whose code counts
        self._anatomy: dict[tuple[int, str], Any] = {}  # these classes and codes
        self._calls: dict[int, tuple[ModuleType, set[str]]] = {}  # modules of libraries: names that are called there
        self.is_whole = bool(self.names & _WHOLE) or ran.computes_names()
        for name, value in zip(("dtype of torch", "autocast"), torch_state(), strict=True):
            self.spots.append(Spot(name, "torch's own state", {name: value}, name, value))

    def given(self, numbers: Numbers) -> None:
        """The numbers among the arguments of a call, and the attributes of its tensors that the code names."""

        names, is_whole = self.names | _CLASSES, self.is_whole  # the walk, which keeps this function, is not kept by it

        def carried() -> list[Any]:
            return [key for key in numbers if len(key) == 3 and (is_whole or key[2] in names)]

        self.spots += [Spot(key[1], "", numbers, key, number) for key, number in numbers.items() if len(key) == 2]
        self.contents.append((carried, carried()))
        for key in carried():
            self._spot(key[1], "", numbers, key, numbers[key], _DEPTH)

    def model(self, model: nn.Module) -> None:
        """The modules that are trained: their tensors are the step's inputs, their modes part of its signature."""
        for table in global_module_hooks():
            self._table("hooks of all modules", "torch.nn.modules.module", table)
        for path, module in tables.named_modules(model):
            self._module(path, "", module, is_outside=False)

    def root(self, root: Root) -> None:
        """What a function reads by a name."""
        if (id(root.holder), root.key) in self.seen:
            return
        self.seen.add((id(root.holder), root.key))
        try:
            value = root.holder[root.key] if isinstance(root.holder, dict) else getattr(root.holder, root.key)
        except ValueError:  # a cell that is not bound yet
            return
        self._spot(root.name, root.where, root.holder, root.key, value, _DEPTH)

    def function(self, function: Any) -> None:
        """The closure and the defaults of a function that ran, or what a loss function of another kind holds."""
        if not isinstance(function, FunctionType):
            self._inside("loss_fn", "", function, _DEPTH)
        elif id(function) not in self.seen and self.ran.has(function):
            self.seen.add(id(function))
            self._part(self.functions, function, f"{function.__qualname__}.__code__", function.__code__)
            for root in own_roots(function):
                self.root(root)

    def libraries(self) -> None:
        """What the code calls of libraries: last, when all that ran is known."""
        for module, names in self._calls.values():
            for key in functions_called(module, frozenset(names)):
                self._called(f"{module.__name__}.{key}", vars(module), key)
            for holder, key in settings_of(module, self.names):
                self.spots.append(Spot(f"{module.__name__} {key}", "", holder, key, getattr(holder, key)))
        for key in sorted(self.names & STATES.keys()):
            self._content(f"{STATES[key].__module__}.{key}()", "", STATES[key])
        if any(names <= self.names for names in _IMPORTERS):
            for key in sorted(self.names & sys.modules.keys()):
                self._within(key, "", sys.modules[key], _DEPTH)
        for kind in MACHINES:
            values = vars(kind)
            self.contents.append((values.__len__, len(values)))  # others may add what nobody calls
            for key in [key for key in values if key in self.names or key.startswith("_")]:
                self._called(f"{kind.__name__}.{key}", values, key)

    def _called(self, name: str, values: Any, key: str) -> None:
        """A function of a library, or what stands in its place: that is looked into."""
        value = values.get(key)
        if not callable(value) and not isinstance(value, property):
            return
        is_own = is_library(getattr(value, "__module__", None)) and not any(map(self.ran.has, _functions_in(value)))
        if not is_own:
            self._spot(name, "", values, key, value, _DEPTH)
        elif is_told(value):
            self.spots.append(Spot(name, "", values, key, value))

    def _part(self, parts: list[Any], whole: Any, name: str, value: Any) -> None:
        """The class of an object, or the code of a function."""
        parts.append(whole)
        key = (len(self._anatomy), name)
        self._anatomy[key] = value
        self.spots.append(Spot(name, "", self._anatomy, key, value))

    def _spot(self, name: str, where: str, holder: Any, key: Any, value: Any, depth: int) -> None:
        if type(value) is LeftBehind:  # no step reads what captures alone write
            return
        if not isinstance(value, ModuleType):
            self.spots.append(Spot(name, where, holder, key, value))
        self._inside(name, where, value, depth)

    def _inside(self, name: str, where: str, value: Any, depth: int) -> None:
        for inner in _functions_in(value):
            self.function(inner)
        if self._is_content(name, where, value):
            return
        if isinstance(value, _GIVEN_ATTRIBUTES) and getattr(value, "__dict__", None):
            held = vars(value)
            if id(held) not in self.seen:
                self.seen.add(id(held))
                self._named(name, where, held, min(depth, 1), is_sized=False)
            return
        if isinstance(value, _OPAQUE) or id(value) in self.seen:
            return
        if depth <= 0:
            if isinstance(value, (dict, *Sequenced)) and value:
                self.unseen[f"'{name}' (nested more than {_DEPTH} deep)"] = where
            return
        if not isinstance(value, (tuple, MethodType)):  # those come and go
            self.seen.add(id(value))
        self._within(name, where, value, depth)

    def _is_content(self, name: str, where: str, value: Any) -> bool:
        """True for what is compared as one: a table of a function, an object of C, a set, an array."""
        entries = Entries.of(value)
        if entries is not None:
            self.contents.append((lambda: entries.are_in(Entries.of(value)), True))
            self.spots.append(Spot(f"table of {name}", where, {name: entries}, name, entries))
            return True
        read = content_of(value)
        if read is not None:
            self._content(name, where, read)
        return read is not None

    def _within(self, name: str, where: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            traced = value.original if isinstance(value, Inlined) else value
            for path, module in tables.named_modules(traced):
                self._module(f"{name}.{path}" if path else name, where, module, is_outside=True)
        elif isinstance(value, ModuleType):
            self._of_module(name, where, value, depth)
        elif isinstance(value, type):
            self._class(name, where, value)
        elif isinstance(value, functools.partial):
            for part, item in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._inside(f"{name}.{part}", where, item, depth)
        elif isinstance(value, MethodType):
            self._inside(name, where, value.__self__, depth)
        elif isinstance(value, weakref.ReferenceType):
            self._inside(name, where, value(), depth)
        elif isinstance(value, (dict, types.MappingProxyType, *Sequenced)):
            self._items(name, where, value, depth)
        elif isinstance(value, tuple):
            for position, item in enumerate(value):  # its numbers belong to the spot at which it stands: it is bound
                if isinstance(item, torch.Tensor):
                    self.spots.append(Spot(f"{name}[{position}]", where, value, position, item))
                self._inside(f"{name}[{position}]", where, item, depth - 1)
        elif isinstance(value, NAMESPACES) or not is_library(type(value).__module__):
            self._object(name, where, value, depth)
        else:
            self._of_library(name, where, value, depth)

    def _of_module(self, name: str, where: str, module: ModuleType, depth: int) -> None:
        """What a module holds; of Python's own library the values, such as `os.environ`."""
        values = vars(module)
        if not is_library(module.__name__):
            self._named(name, where, values, depth)
            return
        self._calls_of(module, self.names)
        if module.__name__.partition(".")[0] in sys.stdlib_module_names and module is not sys.modules["builtins"]:
            names = self.names | names_called(values, self.names)
            values = {k: v for k, v in values.items() if k in names and is_value_of_module(v)}
            for key, item in values.items():
                self._spot(f"{name}.{key}", where, module, key, item, depth - 1)

    def _calls_of(self, module: ModuleType, names: Set[str]) -> None:
        """A module of a library, and those in it, of which code has these names."""
        if module is sys.modules["builtins"]:
            return
        known = self._calls.setdefault(id(module), (module, set()))[1]
        known |= (new := names - known)
        for key in sorted(new & vars(module).keys()):  # in the same order in each process
            inner = vars(module)[key]
            if isinstance(inner, ModuleType) and is_library(inner.__name__):
                self._calls_of(inner, names)

    def _of_library(self, name: str, where: str, value: Any, depth: int) -> None:
        """An object of a class of torch or of Python's own library."""
        held = getattr(value, "__dict__", None)
        if held is not None and holds_values(type(value)):
            self._named(name, where, held, depth, names=attributes_read(type(value), self.names))  # type: ignore[arg-type]
        elif isinstance(held, dict):
            plain = {key: item for key, item in held.items() if isinstance(item, PLAIN) and key in self.names}
            self.spots += [Spot(f"{name}.{key}", where, held, key, item) for key, item in plain.items()]
        elif is_unseen(value):
            self.unseen[f"'{name}' (a {type(value).__module__}.{type(value).__qualname__})"] = where

    def _items(self, name: str, where: str, value: Any, depth: int) -> None:
        """Walk the items of a list, a deque or a dict; of a long one only see that they are the same."""
        is_dict = isinstance(value, (dict, types.MappingProxyType))
        items = list(value.items() if is_dict else enumerate(value))
        if any(type(item) is LeftBehind for _, item in items):  # a log, which captures make longer
            return
        if type(value) not in (dict, types.MappingProxyType, *Sequenced) and hasattr(value, "__dict__"):
            self._object(name, where, value, depth)
        if len(items) > LONG:
            if len(items) > MOST or not all(isinstance(item, PLAIN) for _, item in items):
                self.unseen[f"'{name}' (a {type(value).__name__} of {len(items):,} items)"] = where
            else:
                self._content(name, where, lambda: tuple(value.items() if is_dict else value))
            return
        self.sized.append(value)
        if is_dict and all(isinstance(key, PLAIN) for key in value):
            self._content(f"order of {name}", where, lambda: tuple(value))
        for position, (key, item) in enumerate(items):  # other keys may print with their address
            shown = text_of(key) if isinstance(key, PLAIN) else f"key {position}"
            self._spot(f"{name}[{shown}]", where, value, key, item, depth - 1)

    def value(self, tensor: torch.Tensor) -> None:
        """A tensor that was read as a Python number."""
        names = [spot for spot in self.spots if spot.value is tensor]
        name, where = (names[0].name, names[0].where) if names else ("a tensor", "read as a number")
        self._content(name, where, lambda: _content_of(tensor))

    def _content(self, name: str, where: str, read: Callable[[], Any]) -> None:
        was = read()
        self.contents.append((read, was))
        self.spots.append(Spot(f"{name} inside", where, {name: was}, name, was))

    def _object(self, name: str, where: str, value: Any, depth: int) -> None:
        holder = getattr(value, "__dict__", None)
        if isinstance(holder, dict):
            computed = any("__getattr__" in vars(c) or "__getattribute__" in vars(c) for c in _classes(type(value)))
            self._named(name, where, holder, depth - 1, every=self.is_whole or computed)
        self._part(self.objects, value, f"{name}.__class__", type(value))
        for cls in _classes(type(value)):
            for key in vars(cls).get("__slots__", ()):
                if key in self.names and hasattr(value, key):
                    self._spot(f"{name}.{key}", where, value, key, getattr(value, key), depth - 1)
        self._class(name, where, type(value))

    def _named(
        self, name: str, where: str, holder: dict[str, Any], depth: int, every: bool = False,
        names: Set[str] | None = None, is_sized: bool = True,
    ) -> None:  # fmt: skip
        """The items of a dict of attributes whose names stand in the code."""
        names = self.names if names is None else names
        self.sized += [holder] * is_sized
        for key, item in list(holder.items()):
            if (every or key in names) and key not in _OWN:
                self._spot(f"{name}.{key}" if name else key, where, holder, key, item, depth)

    def _class(self, name: str, where: str, kind: type) -> None:
        """What classes of the user's hold: methods and values, and what overrides a method that ran."""
        found = [cls for cls in _classes(kind) if (id(cls), "class") not in self.seen]
        items = [item for cls in _classes(kind) for item in vars(cls).items()] if found else []
        ran = {key for key, item in items if any(map(self.ran.has, _functions_in(item)))}
        for cls in found:
            if type(cls) is not type and not is_library(type(cls).__module__):
                self._class(name, where, type(cls))
            self.seen.add((id(cls), "class"))
            holder = vars(cls)
            self.contents.append((holder.__len__, len(holder)))
            for key, item in list(holder.items()):
                if (key in self.names and not key.startswith("__")) or key in ran:
                    self._spot(f"{cls.__name__}.{key}", where, holder, key, item, 1)

    def _module(self, path: str, where: str, module: nn.Module, is_outside: bool) -> None:
        if (id(module), "module") in self.seen:
            return
        self.seen |= {id(module), (id(module), "module")}
        values, torchs = vars(module), _layers(type(module))
        self._part(self.objects, module, _joined(path, "__class__"), type(module))
        for kind in torchs:
            self._layer(kind)
        if torchs and type(module) in torchs:
            for key, item in list(values.items()):
                if key not in _OWN and not key.startswith("_") and isinstance(item, (*_OPAQUE, tuple, MethodType)):
                    self.spots.append(Spot(_joined(path, key), where, values, key, item))
            self.sized.append(values)
        else:
            self._named(path, where, values, _DEPTH, every=bool(torchs) or self.is_whole)
        if is_outside:
            self.spots.append(Spot(_joined(path, "training"), where, values, "training", module.training))
        for table in ("_buffers", *(_TENSORS if is_outside else ())):
            self.sized.append(values[table])
            for key, tensor in values[table].items():
                self.spots.append(Spot(_joined(path, key), where or table[1:], values[table], key, tensor))
        for hooks in hook_tables(module):
            self._table(_joined(path, "hooks"), where, hooks)
        self._class(path, where, type(module))

    def _layer(self, kind: type) -> None:
        """What the code of a layer of torch calls."""
        if (id(kind), "layer") in self.seen:
            return
        self.seen.add((id(kind), "layer"))
        for module in (torch, nn.functional):
            self._calls_of(module, names_of_layer(kind))
        values = vars(kind)
        if "forward" in values:
            self._called(f"{kind.__name__}.forward", values, "forward")

    def _table(self, name: str, where: str, hooks: dict[Any, Any]) -> None:
        if not hooks:
            self.empty.append(hooks)
            return
        self.sized.append(hooks)
        for position, (key, hook) in enumerate(hooks.items()):
            self._spot(f"{name}[{position}]", where, hooks, key, hook, _DEPTH)


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """The tables of the hooks that run with a module."""
    return [
        t for n, t in vars(module).items() if n.endswith("_hooks") and "state_dict" not in n and isinstance(t, dict)
    ]


def _functions_in(value: Any) -> list[FunctionType]:
    """A function, or those that a property, a cache or the like wraps."""
    found = [value]
    for name in ("__func__", "__wrapped__", "fget", "func"):
        inner = getattr(value, name, None) if isinstance(value, _WRAPPERS) else None
        found += [inner]
    return [function for function in found if isinstance(function, FunctionType)]


def _content_of(tensor: torch.Tensor) -> str:
    """What a tensor holds, as a text; of a long one the digest of its memory."""
    if tensor.numel() <= LONG:
        return repr(tensor.tolist())
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.numel()} values ({hashlib.blake2b(data, digest_size=8).hexdigest()})"


def torch_state() -> tuple[Any, ...]:
    """What torch keeps that decides how a step computes."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.get_default_dtype(), tuple(autocast)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@functools.cache
def is_library(module: str | None) -> bool:
    """True for what torch, Python's own library and autopar define."""
    top = (module or "builtins").partition(".")[0]
    return (top in sys.stdlib_module_names and top != "__main__") or top in ("torch", "autopar", "numpy")


def _classes(kind: type) -> tuple[type, ...]:
    """A class of the user's with those of its bases that are."""
    return tuple(cls for cls in kind.__mro__ if not is_library(cls.__module__))


_BOOKS = (nn.Module, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict, object)


def _layers(kind: type) -> tuple[type, ...]:
    """The layers of torch that a class is: their code is not looked at, so that every attribute may be read."""
    return tuple(cls for cls in kind.__mro__ if cls.__module__.startswith("torch.") and cls not in _BOOKS)
