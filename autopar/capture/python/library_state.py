"""What code reads of objects that Python's own library and torch define: optimizers, schedulers, queues, parsers.

Their classes' code is not the user's, so that no run of it is watched. It is read instead: a method that the user's
code names, or that an operator calls, names the attributes that it reads, and the methods that it calls.
"""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

# Modules whose objects are looked into: they hold values.
_HOLDERS = ("torch.optim", "torch.distributions", "torch.amp", "collections", "configparser", "queue", "types",
            "string", "multiprocessing", "dataclasses", "copy", "enum", "statistics", "random", "weakref",
            "os")  # fmt: skip
# Modules whose objects are tools: nothing that a step computes with comes from their changes.
_TOOLS = ("logging", "threading", "_thread", "_multiprocessing", "warnings", "re",
          "typing", "abc", "io", "_io", "contextlib", "functools",
          "inspect", "traceback", "_weakref", "itertools", "operator", "time", "builtins", "torch", "numpy",
          "autopar", "types", "unittest", "concurrent", "asyncio")  # fmt: skip
# What Python calls at other moments than a step's own: where an object is made, shown, copied or pickled.
_ELSEWHERE = frozenset(
    ("__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__copy__", "__deepcopy__",
     "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__class_getitem__", "__setattr__", "__setitem__",
     "__delitem__", "__delattr__", "__dir__", "__sizeof__", "__hash__")
)  # fmt: skip


def holds_values(kind: type) -> bool:
    """True for a class whose objects are looked into."""
    return issubclass(kind, threading.local) or _is_of(kind, _HOLDERS)


def is_unseen(value: Any) -> bool:
    """True for an object that may change where nobody sees it: neither a tool nor a value of its own, which is equal to
    others by what it holds and never changes."""
    kind = type(value)
    by_value = kind.__hash__ is not None and kind.__hash__ is not object.__hash__
    return not (by_value or isinstance(value, (type, Iterator)) or _is_of(kind, _TOOLS))


def _is_of(kind: type, modules: tuple[str, ...]) -> bool:
    name = kind.__module__ or ""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@functools.lru_cache(1024)
def attributes_read(kind: type, names: frozenset[str]) -> frozenset[str]:
    """The names in the code that names a method of a class, and in the methods that are called there. names: those in
    the user's code."""
    special = (name for cls in kind.__mro__[:-1] for name in vars(cls) if name[:2] == name[-2:] == "__")
    return names | names_reached(kind, [*names, *special])


def names_reached(kind: type, methods: list[str]) -> frozenset[str]:
    """The names in the code of some methods of a class and of its bases, and in the methods that are called there."""
    found, seen, pending = set[str](), set[str](), methods
    while pending:
        name = pending.pop()
        if name in seen or name in _ELSEWHERE:
            continue
        seen.add(name)
        for member in (vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)):  # `super()` calls one behind it
            for code in codes_of(member):
                found.update(code.co_names)
                pending += code.co_names
    return frozenset(found)


def codes_of(member: Any) -> Iterator[CodeType]:
    """The code of a method, a property, a class or static method, and of functions within."""
    for function in (member, *(getattr(member, name, None) for name in ("fget", "__func__", "__wrapped__", "func"))):
        if isinstance(function, FunctionType):
            pending = [function.__code__]
            while pending:
                code = pending.pop()
                yield code
                pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


MOST = 100_000  # items of a set or a long list, bytes of an array, that are compared at each step


def content_of(value: Any) -> Callable[[], Any] | None:
    """What reads all that a set or an object of C holds, to be compared; None for what is not known, or too large."""
    if isinstance(value, set):
        return value.copy if len(value) <= MOST else None
    if isinstance(value, np.ndarray):
        return (lambda: (value.shape, value.dtype.str, value.tobytes())) if value.nbytes <= 8 * MOST else None
    if isinstance(value, (bytearray, memoryview, ctypes.Array)):
        return lambda: bytes(value)
    if isinstance(value, array.array):
        return value.tobytes
    if isinstance(value, ctypes._SimpleCData):
        return lambda: value.value
    if isinstance(value, ContextVar):
        return lambda: _as_known(value.get(None))
    return None


def is_value_of_module(value: Any) -> bool:
    """True for what is data among what a module of Python's own library holds; the table of modules is none."""
    return not (callable(value) or isinstance(value, ModuleType) or value is sys.modules)


def names_called(values: Mapping[str, Any], names: Set[str]) -> set[str]:
    """The names in the code of the functions of a module that are called: `os.getenv` reads `environ`."""
    called = (values.get(name) for name in names)
    return {name for function in called if isinstance(function, FunctionType) for name in function.__code__.co_names}


def _as_known(value: Any) -> Any:
    return value if isinstance(value, (int, float, complex, str, bytes, bool, type(None))) else id(value)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a table of `functools.lru_cache`: all stay until it is emptied, and others may come."""

    held: dict[int, Any]  # by their ids, which stay theirs

    @staticmethod
    def of(function: Any) -> Entries | None:
        """The entries of a function with such a table; None of another one."""
        if not isinstance(function, _Table) or function.cache_info().currsize > MOST:
            return None
        inside = gc.get_referents(function)
        inside += [item for table in inside if isinstance(table, dict) for item in table.values()]
        return Entries({id(item): item for item in inside})

    def are_in(self, other: Entries | None) -> bool:
        """True if another look finds them all."""
        return other is not None and self.held.keys() <= other.held.keys()


_Table = type(functools.cache(len))
Sequenced = (list, collections.deque)  # what is read by position
