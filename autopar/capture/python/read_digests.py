"""Tell whether another process has the Python that a captured step read: its code, and the values that it found there.

`Guards` compare with what the step read in this process. For another process the same spots are told by digests: of a
function's code, of plain values, of what a tensor's program is made for. Of an object of the user's it is the class,
since its insides are spots of their own. What cannot be told so is `Unclear`, and then nothing is kept: a program that
is taken for another one gives wrong numbers without a word, one that is compiled again costs seconds.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import hashlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.python.guards import Guards, form
from autopar.capture.python.library_calls import MEMBERS
from autopar.capture.python.library_state import Entries
from autopar.capture.python.ran import Ran, with_nested
from autopar.capture.python.spots import Spot, is_library
from autopar.torch_compat import OpOverload

_DEPTH = 32  # of containers in each other
_TABLE = type(functools.cache(len))
_NO_CODE = (lambda: None).__code__
_OPS = (OpOverload, type(torch.ops.aten.add))
# Modules of objects that hold nothing a step computes with.
_TOOLS = frozenset(("logging", "warnings", "typing", "threading", "_thread"))
# Modules by which code reads what is neither its own nor an argument: files, clocks, other processes.
_OUTSIDE = frozenset(
    ("time", "datetime", "io", "os", "pathlib", "subprocess", "socket", "uuid", "tempfile", "pickle", "shelve", "dbm",
     "sqlite3", "csv", "glob", "shutil", "secrets", "mmap", "urllib", "http", "platform", "posix", "nt", "importlib",
     "random", "marshal", "zipfile", "tarfile", "gzip", "bz2", "lzma", "select", "signal", "ctypes")
)  # fmt: skip
# What reads a file, or draws, by whichever module it is called.
_READERS = frozenset(
    ("open", "input", "load", "loads", "loadtxt", "genfromtxt", "fromfile", "from_file", "memmap", "load_file",
     "safe_open", "from_pretrained", "load_state_dict", "load_state_dict_from_url", "read_csv", "imread", "read_text",
     "read_bytes", "urlopen", "exec", "eval", "compile", "__import__", "import_module")
)  # fmt: skip

# What tells one rank from another: a program that was compiled on one is no other one's.
_RANKS = frozenset(
    ("get_rank", "get_group_rank", "get_local_rank", "get_node_local_rank", "get_coordinate", "_get_default_group",
     "initial_seed")
)  # fmt: skip


Place = tuple[str, str, int]  # of code: its file, name and first line


class Unclear(Exception):
    """Something that another process cannot be asked for."""


def digest(*texts: str) -> str:
    """One digest of texts, in their order."""
    found = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


# -- code -----------------------------------------------------------------------------------------------------------


def code_digest(code: CodeType) -> str:
    """The digest of a function's code: what it does, and on which lines of which file."""
    constants = [code_digest(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    data = (code.co_code, code.co_exceptiontable, code.co_linetable)
    return digest(code.co_filename, code.co_qualname, repr(counts), repr(names), repr(data), *constants)


def _constant(value: Any) -> str:
    """A constant of code, told apart from those that are equal to it: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, (tuple, frozenset)):
        items = [_constant(one) for one in value]
        return f"{type(value).__name__}({', '.join(items if isinstance(value, tuple) else sorted(items))})"
    return f"{type(value).__name__} {value!r}"


def place_of(code: CodeType) -> Place:
    """Where code stands: cheaper to ask for than its digest."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def live_codes(wanted: Mapping[str, Place]) -> dict[str, tuple[CodeType, dict[str, Any]]] | None:
    """The code of this process with these digests, with the globals that it reads; None if some is not there.

    wanted: where each stands. It is looked for in the modules of these files first: what the collector knows (functions
    that were made by others) takes longer to look through, and is not all (`gc.freeze`).
    """
    places, found = set(wanted.values()), dict[str, tuple[CodeType, dict[str, Any]]]()
    files, seen = {place[0] for place in places}, set[int]()
    for functions in (_functions_of_modules(files), _functions_of_dataclasses(files), _functions_of_collector(files)):
        for function in functions:
            for code in with_nested(function.__code__):
                if id(code) in seen or place_of(code) not in places:
                    continue
                seen.add(id(code))
                if (key := code_digest(code)) in wanted:
                    found.setdefault(key, (code, function.__globals__))
        if found.keys() == wanted.keys():
            return {key: found[key] for key in wanted}
    return None


def _functions_of_modules(files: Set[str]) -> Iterator[FunctionType]:
    """The functions that the loaded modules of these files hold: themselves, in classes, behind decorators; and those
    of the main module, whose code stands in no file in a notebook."""
    loaded = list(sys.modules.items())
    modules = {name: one for name, one in loaded if getattr(one, "__file__", None) in files or name == "__main__"}
    seen = set[int]()
    for module in modules.values():
        pending = list(vars(module).values())
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, FunctionType):
                if value.__code__.co_filename in files:
                    yield value
                pending += _held_by(value)
            elif isinstance(value, type) and value.__module__ in modules:  # which others import
                pending += vars(value).values()
            elif isinstance(value, (property, classmethod, staticmethod, functools.cached_property)):
                pending += [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]


def _functions_of_dataclasses(files: Set[str]) -> Iterator[FunctionType]:
    """The functions that `dataclass` wrote, which stand in no file, of the classes that any module has: methods, and
    what those call that stand in their place."""
    if "<string>" not in files:
        return
    for module in list(sys.modules.values()):
        for kind in list(vars(module).values()) if isinstance(module, ModuleType) else ():
            if issubclass(type(kind), type) and "__dataclass_fields__" in vars(kind):  # `isinstance` wakes what is old
                methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
                held = [one for method in methods for one in _held_by(method) if isinstance(one, FunctionType)]
                yield from (*methods, *held)


def _held_by(function: FunctionType) -> Iterator[Any]:
    """The functions that a function calls by a closure, or stands for."""
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not bound yet
            yield cell.cell_contents


def _functions_of_collector(files: Set[str]) -> Iterator[FunctionType]:
    return (one for one in gc.get_objects() if type(one) is FunctionType and one.__code__.co_filename in files)


def reads_outside(ran: Ran) -> str | None:
    """What the code that ran reads of files, clocks, other processes or this one's rank, by name; None if it reads
    nothing there."""
    telling = _READERS | _RANKS
    names = sorted(telling & ran.called_names())
    if names:
        return names[0]
    for code, name, value in ran.read_globals():
        if isinstance(value, (FunctionType, BuiltinFunctionType)) and value.__name__ in telling:
            return value.__name__  # imported under another name
        is_tool = isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)) or value is os.environ
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        is_outside = is_tool and str(module).partition(".")[0].lstrip("_") in _OUTSIDE
        if is_outside and not (_is_of_environment(value) and _names_variables(code)):
            return name
    return None


def _is_of_environment(value: Any) -> bool:
    return value is os or value is os.environ or value is os.getenv


def _names_variables(code: CodeType) -> bool:
    """True for code that reads nothing of `os` but variables whose names stand in it."""
    used = {name for name in code.co_names if hasattr(os, name)} - {"os", "environ", "getenv", "path"}
    files = {name for name in code.co_names if hasattr(os.path, name)} - {"join", "basename", "dirname", "os", "path"}
    is_put_together = any(each.opname in ("BUILD_STRING", "FORMAT_VALUE") for each in dis.get_instructions(code))
    return not (used or files or is_put_together) and any(map(_is_variable, code.co_consts))


def _is_variable(text: Any) -> bool:
    """True for what may be the name of a variable of the environment."""
    return isinstance(text, str) and text.isupper() and text.isidentifier()


# -- values ---------------------------------------------------------------------------------------------------------


def described(value: Any, depth: int = _DEPTH) -> str:
    """A value as text that is another one for each other value, and the same in each process. Raises Unclear."""
    if depth < 0:
        raise Unclear("containers that are nested too deep")
    kind, name = type(value), _class_name(type(value))
    plain = _plain(value)
    if plain is not None:
        return f"{name} {plain}"
    if isinstance(value, type):
        return f"class {_class_name(value)}"
    if isinstance(value, Enum):
        return f"{name}.{value.name} {described(value.value, depth - 1)}"
    if kind in (tuple, list, torch.Size) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return f"{name}({', '.join(described(one, depth - 1) for one in value)})"
    if kind is dict or (isinstance(value, Mapping) and is_library(kind.__module__)):
        items = (f"{described(key, depth - 1)}: {described(one, depth - 1)}" for key, one in value.items())
        return f"{name}({', '.join(items)})"
    if kind in (set, frozenset):  # in no order
        return f"{name}({', '.join(sorted(described(one, depth - 1) for one in value))})"
    if is_dataclass(value) and not isinstance(value, type) and (kind.__module__ or "").startswith("autopar"):
        items = (f"{each.name}={described(getattr(value, each.name), depth - 1)}" for each in fields(value))
        return f"{name}({', '.join(items)})"
    raise Unclear(f"a {kind.__module__}.{kind.__qualname__}")


def _plain(value: Any) -> str | None:
    """A value that holds no others, as text beside the name of its class; None for another one."""
    kind = type(value)
    if kind is float:
        return str(value.hex())
    if kind is complex:
        return f"{value.real.hex()} {value.imag.hex()}"
    if value is None or kind in (bool, int, str, bytes, type(...), torch.dtype, torch.device, torch.layout):
        return repr(value)
    if kind in (torch.memory_format, range, torch.finfo, torch.iinfo):
        return str(value)
    if isinstance(value, np.generic):
        return f"{value.dtype.str} {value.tobytes().hex()}"
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return f"{value.shape} {value.dtype.str} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if kind is re.Pattern:
        return f"{value.pattern!r} {value.flags}"
    return repr(str(value)) if isinstance(value, PurePath) else None


def _class_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _class(kind: type) -> str:
    """A class by its name, and one of the user's by the code of its methods, too: their values are spots."""
    methods: list[str] = []
    for cls in kind.__mro__ if not is_library(kind.__module__) else ():
        if not is_library(cls.__module__):
            found = [(name, _function(one)) for name, one in vars(cls).items() if isinstance(one, FunctionType)]
            methods += [_class_name(cls), *(f"{name}={code}" for name, code in sorted(found))]
    return digest(_class_name(kind), *methods)


def _function(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__} {code_digest(function.__code__)}"


def is_installed(file: str) -> bool:
    """Whether a file is of an installed package, and not the user's own."""
    return not {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts)


@functools.cache
def installed() -> str:
    """The digest of the names and versions of all installed packages: what a table of `functools.cache` in one of them
    holds, as whether torch is new enough, follows from that and from the code around it."""
    folders = (folder for folder in sys.path if is_installed(folder) and os.path.isdir(folder))
    return digest(*sorted({name for one in folders for name in os.listdir(one) if name.endswith("-info")}))


class _Values:
    """Describes the values of spots. Objects that several of them share are told by the first of them."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._classes: dict[type, str] = {}

    def text(self, value: Any, depth: int = _DEPTH) -> str:
        """What is said of a value. Raises Unclear."""
        kind = type(value)
        if depth < 0:
            raise Unclear("containers that are nested too deep")
        if isinstance(value, torch.Tensor):
            stride = value.stride() if value.layout is torch.strided else ()
            return f"tensor {self._which(value)} {_class_name(kind)} {form(value)} {stride}"
        if isinstance(value, nn.Module):
            return f"module {self._which(value)} {self._class(kind)}"
        if isinstance(value, (FunctionType, type, *MEMBERS, *_OPS)):
            return self._named(value)
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            return self._method(value, depth - 1)
        if kind is CodeType:
            return f"code {code_digest(value)}"
        if kind is ContextVar:
            return f"{value.name} {described(value.get(None))}"
        if isinstance(value, _TABLE) and is_installed(getattr(value.__wrapped__, "__code__", _NO_CODE).co_filename):
            return f"table of {self.text(value.__wrapped__)} {installed()}"
        if isinstance(value, Entries):  # of such a table, whose function is told
            return "entries"
        if value is os.environ:  # see `read_digest`
            return "environment"
        if isinstance(value, tuple):
            return f"{self._class(kind)}({', '.join(self.text(one, depth - 1) for one in value)})"
        if isinstance(value, (functools.partial, property, classmethod, staticmethod, functools.cached_property)):
            return self._wrapper(value, depth - 1)
        is_plain = isinstance(value, (int, float, complex, str, bytes, Enum, np.generic, set, frozenset))
        is_held = isinstance(value, (list, dict, collections.deque, SimpleNamespace, Namespace))
        if not is_plain and (is_held or not is_library(kind.__module__)):
            return f"object {self._which(value)} {self._class(kind)}"  # its items are spots
        if kind.__module__.partition(".")[0] in _TOOLS:
            return f"tool {_class_name(kind)}"
        return described(value)

    def _named(self, value: Any) -> str:
        if isinstance(value, FunctionType):
            return f"function {_function(value)}"
        if isinstance(value, type):
            return f"class {self._class(value)}"
        return f"{type(value).__name__} {getattr(value, '__qualname__', value)}"

    def _method(self, value: Any, depth: int) -> str:
        owner = value.__self__
        of = getattr(owner, "__name__", "") if owner is None or isinstance(owner, ModuleType) else None
        of = self.text(owner, depth) if of is None else of
        name = (
            self.text(value.__func__) if isinstance(value, MethodType) else f"{value.__module__} {value.__qualname__}"
        )
        return f"method {name} of {of}"

    def _wrapper(self, value: Any, depth: int) -> str:
        if isinstance(value, functools.partial):
            inner: Iterable[Any] = (value.func, value.args, tuple(value.keywords.items()))
        else:
            inner = (getattr(value, name, None) for name in ("fget", "fset", "__func__", "func"))
        return f"{type(value).__name__} {', '.join(self.text(one, depth) for one in inner)}"

    def _class(self, kind: type) -> str:
        if kind not in self._classes:
            self._classes[kind] = _class(kind)
        return self._classes[kind]

    def _which(self, value: Any) -> int:
        return self._seen.setdefault(id(value), len(self._seen))


def read_digest(guards: Guards) -> str:
    """The digest of all that a step read in Python. Raises Unclear, with the name of what another process cannot be
    asked for."""
    if guards.notes:
        raise Unclear(guards.notes[0])
    values, lines = _Values(), []
    # Of the environment, which is another one at each start, the variables that code names.
    variables = vars(os.environ).get("_data")
    named = sorted(filter(_is_variable, guards.ran.names())) if any(map(_reads_environment, guards.spots)) else []
    lines += [f"{name}={os.environ.get(name)}" for name in named]
    for key, spot in guards.index.items():
        if spot.holder is variables or spot.value is variables or _is_order_of(spot, variables):
            continue
        try:
            lines.append(f"{key} {values.text(spot.value)}")
        except Unclear as found:
            raise Unclear(f"{spot}: {found}") from None
    return digest(repr(guards.sizes(variables)), *lines)


def _reads_environment(spot: Spot) -> bool:
    return spot.value is os.environ or spot.value is os.getenv


def _is_order_of(spot: Spot, held: Any) -> bool:
    """Whether a spot is the order of a dict's keys."""
    return spot.name.startswith("order of ") and isinstance(held, dict) and spot.value == tuple(held)


def with_codes(codes: Sequence[tuple[CodeType, dict[str, Any]]]) -> Ran:
    """What ran, from code alone: of functions that share it, each is taken for one that ran."""
    ran = Ran()
    ran.take(codes)
    return ran
