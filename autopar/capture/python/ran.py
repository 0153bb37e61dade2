"""Collect the user's functions that ran: what they read from outside of the step is named in their code."""

from __future__ import annotations

import dis
import functools
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from autopar.capture.python.stand_in import Scalar
from autopar.capture.refusals.location import is_typed, is_user_file
from autopar.torch_compat import FakeTensor, OpOverload, dispatch_modes, saved_tensor_hooks

# Tell the calls of torch functions that run none of the user's code, whatever torch does inside of them.

_NAMESPACES = ("aten", "prims", "prim", "autopar")  # those of other ops may be written in Python
LIBRARIES = "site-packages"
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)  # a subclass of the user's has functions of its own
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
# FurtherLayers may have methods that torch calls (`__index__`), or be functions.
_VALUES = frozenset(
    (int, float, complex, bool, str, bytes, NoneType, EllipsisType, torch.Size, torch.dtype, torch.device,
     torch.layout, torch.memory_format, torch.Generator, *_TENSORS)
)  # fmt: skip


def is_plain_call(func: Any, types: Any, args: Any, kwargs: Any, modes: int) -> bool:
    """True for a call of torch's own function on plain values, with nothing of the user's between it and its ops.

    modes: the number of dispatch modes on the stack that are not the user's.
    """
    return (
        _is_torchs(func)
        and all(kind in _TENSORS for kind in types)
        and _is_plain(args)
        and (not kwargs or _is_plain(tuple(kwargs.values())))
        and dispatch_modes() <= modes
        and saved_tensor_hooks() is None
    )


@cache
def _is_torchs(func: Any) -> bool:
    if isinstance(func, OpOverload):
        return func.namespace in _NAMESPACES
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, _BUILT_IN)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _VALUES:
        return True
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    return kind is slice and _is_plain((value.start, value.stop, value.step))


@functools.cache
def _is_user(filename: str) -> bool:
    return is_user_file(filename) or is_typed(filename)


def _is_generated(frame: FrameType) -> bool:
    """True for what Python wrote for a class in no file: of torch or autopar the `__init__` of a dataclass, and the
    `__new__` of any namedtuple, which reads a name of Python's own."""
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return (top in ("autopar", "torch") or top.startswith("namedtuple_")) and is_typed(frame.f_code.co_filename)


@dataclass(frozen=True, slots=True)
class Root:
    """A place where a function of the user's reads: a global (`holder` is its module's dict) or a cell of a closure."""

    name: str
    where: str
    holder: dict[str, Any] | CellType | FunctionType
    key: str


class _Pause:
    """Stops watching, unless that is stopped already."""

    def __init__(self, put: Callable[[Any], None], watching: Callable[..., None]) -> None:
        self._put, self._watching, self._depth = put, watching, 0

    def __enter__(self) -> None:
        if not self._depth:
            self._put(None)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._put(self._watching)


_WATCHED = nullcontext()
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Ran:
    """Collects the code of the user's functions that run inside of `watch`."""

    def __init__(self) -> None:
        self._codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._bound: dict[int, set[tuple[int, ...]]] = {}  # the values of a code's free variables, by their ids
        self.is_whole = False  # once a run came to its end
        self.values: list[torch.Tensor] = []  # tensors that were read as Python numbers
        self.asked: set[str] = set()  # what it asks of tensors beside their values (`batch_forms.py`)
        self.marked: set[str] = set()  # attributes that it left on tensors of the batch
        self.differentiated: set[str] = set()  # parameters of which the step itself asked for the gradient
        self._known: dict[int, tuple[FunctionType, bool]] = {}
        self._interrupts: frozenset[CodeType] = frozenset()
        self._aside: FrameType | None = None  # a call of one of these, and all that it calls
        self._pause: AbstractContextManager[None] | None = None  # while it watches
        self._modes = 0  # dispatch modes that were on when it began to

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Collect on this thread, for as long as the context lasts. By a profile function; where the user takes a
        profile, which it would end, by a trace function."""
        taken = sys.getprofile()
        get, put = (sys.getprofile, sys.setprofile) if taken is None else (sys.gettrace, sys.settrace)
        before: Any = get()
        self._interrupts = frozenset(_interrupts())
        self._modes, self._pause = dispatch_modes(), _Pause(put, self._saw)
        put(self._saw)
        try:
            yield
        finally:
            put(before)
            self._aside = self._pause = None

    def unwatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Do not watch a call of a torch function that runs none of the user's code: what torch itself calls there is
        most of what Python does."""
        pause = self._pause
        return pause if pause and is_plain_call(func, types, args, kwargs, self._modes) else _WATCHED

    def _saw(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or self._is_aside(frame) or not _is_user(code.co_filename) or _is_generated(frame):
            return
        self._codes.setdefault(id(code), (code, frame.f_globals))
        if code.co_freevars:
            values = frame.f_locals
            bound = tuple(id(Scalar.original(values.get(name))) for name in code.co_freevars)
            self._bound.setdefault(id(code), set()).add(bound)

    def _is_aside(self, frame: FrameType) -> bool:
        """True in what the interpreter calls at a moment of its own, which is no part of the step: callbacks of the
        garbage collector, finalizers, handlers of signals."""
        if self._aside is not None:
            caller: FrameType | None = frame
            while caller is not None and caller is not self._aside:
                caller = caller.f_back
            if caller is not None:
                return True
            self._aside = None
        if frame.f_code in self._interrupts or frame.f_code.co_name == "__del__":
            self._aside = frame
        return self._aside is not None

    def add(self, function: Any) -> None:
        """A function that runs elsewhere, in a backward pass, and those that it names."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or not _is_user(function.__code__.co_filename):
            return
        if id(function.__code__) in self._codes:
            return
        self._codes[id(function.__code__)] = function.__code__, function.__globals__
        for code in with_nested(function.__code__):
            for name in code.co_names:
                self.add(function.__globals__.get(name))

    def add_backward(self) -> None:
        """The backward passes of the user's autograd functions, which only the step itself runs."""
        for code, values in list(self._codes.values()):
            for name in code.co_names:
                found = values.get(name)
                if isinstance(found, type) and issubclass(found, torch.autograd.Function):
                    self.add(vars(found).get("backward") and found.backward)

    @property
    def codes(self) -> tuple[tuple[CodeType, dict[str, Any]], ...]:
        """The code that ran, each with the globals that it reads."""
        return tuple(self._codes.values())

    def own_code_beside(self, other: Ran) -> list[CodeType]:
        """The code of the user's own files that ran here and not there: what libraries keep is theirs."""
        codes = (code for key, (code, _) in self._codes.items() if key not in other._codes)
        return [code for code in codes if LIBRARIES not in code.co_filename]

    def take(self, codes: Iterable[tuple[CodeType, dict[str, Any]]]) -> None:
        """Take code for what ran: with it each function that has it."""
        self._codes.update((id(code), (code, values)) for code, values in codes)

    def called_names(self) -> set[str]:
        """The names in the code, of globals and of attributes, without its texts."""
        return {name for code, _ in self._codes.values() for inner in with_nested(code) for name in inner.co_names}

    def include(self, other: Ran) -> None:
        """Take over what ran in another run."""
        self._codes.update(other._codes)
        for code, bound in other._bound.items():
            self._bound.setdefault(code, set()).update(bound)
        self.values += other.values
        self.differentiated |= other.differentiated
        self.asked |= other.asked
        self.marked |= other.marked
        self._known.clear()

    def differentiate(self, parameters: Iterable[tuple[str, torch.Tensor]], tensors: Iterable[torch.Tensor]) -> None:
        """Note which parameters are among the tensors of which the step took a gradient."""
        asked = set(map(id, tensors))
        self.differentiated |= {name for name, each in parameters if id(each) in asked}

    def covers(self, other: Ran) -> bool:
        """True if nothing ran there that did not run here."""
        return other._codes.keys() <= self._codes.keys()

    def names(self) -> set[str]:
        """Every name and text in the code: among them those of all attributes that it reads."""
        names: set[str] = {"forward"}
        for code, _ in self._codes.values():
            for inner in with_nested(code):
                names.update(inner.co_names)
                names.update(_texts(inner.co_consts))
        return names

    def computes_names(self) -> bool:
        """True if code reads an attribute by a name that does not stand in it."""
        return any(_computes_names(inner) for code, _ in self._codes.values() for inner in with_nested(code))

    def has(self, function: FunctionType) -> bool:
        """True if this function ran, not another one of the same code; as it was when it was first asked."""
        if id(function) not in self._known:
            code = id(function.__code__)
            bound = self._bound.get(code)
            is_bound = bound is None or tuple(map(_contents, function.__closure__ or ())) in bound
            self._known[id(function)] = function, code in self._codes and is_bound
        return self._known[id(function)][1]

    def read_globals(self) -> Iterator[tuple[CodeType, str, Any]]:
        """The globals and modules that each piece of code reads by name, with their values."""
        for code, values in self._codes.values():
            for inner in with_nested(code):
                yield from ((inner, name, values[name]) for name in _read_by(inner) if name in values)
                yield from ((inner, n, sys.modules[n]) for n in _imported(inner, values) if n in sys.modules)

    def globals(self) -> Iterator[Root]:
        """The globals that the code reads: not what only has the name of an attribute that it reads."""
        for code, values in self._codes.values():
            where = f"{_place(code)}, a global that {_name(code)} reads"
            for inner in with_nested(code):
                named = values if _GLOBALS.intersection(inner.co_names) else _read_by(inner)
                yield from (Root(name, where, values, name) for name in list(named) if name in values)
                modules = (name for name in _imported(inner, values) if name in sys.modules)
                yield from (
                    Root(name, f"{_place(code)}, imported by {_name(code)}", sys.modules, name) for name in modules
                )


def _read_by(code: CodeType) -> Iterator[str]:
    """The globals that code reads; `co_names` has its attributes too."""
    loads = (each for each in dis.get_instructions(code) if each.opname in _LOADS)
    return iter(dict.fromkeys(str(each.argval) for each in loads))


def _interrupts() -> Iterator[CodeType]:
    """The code that the interpreter calls between two instructions of the user's; of `__del__`, the name is enough."""
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    for function in (*gc.callbacks, *handlers, weakref.finalize.__call__):
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function.__code__


def own_roots(function: FunctionType) -> Iterator[Root]:
    """The cells of a function's closure, and the defaults of its arguments."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield Root(name, f"{_place(code)}, closure of {_name(code)}", cell, "cell_contents")
    for kind in ("__defaults__", "__kwdefaults__"):
        if getattr(function, kind):
            yield Root("defaults", f"{_place(code)}, default arguments of {_name(code)}", function, kind)


def _place(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _contents(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # not bound yet
        return id(None)


def with_nested(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those defined in it: hooks on gradients run in the step alone."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)


@functools.lru_cache(1024)
def _imports(code: CodeType) -> tuple[tuple[int, str], ...]:
    """The modules that a function imports itself: how many packages up, and the name."""
    seen = list(dis.get_instructions(code))
    return tuple((seen[at - 2].argval or 0, i.argval) for at, i in enumerate(seen) if i.opname == "IMPORT_NAME")


def _imported(code: CodeType, values: dict[str, Any]) -> Iterator[str]:
    """Their whole names, and those of the packages above."""
    for level, name in _imports(code) if _IMPORT in code.co_code else ():
        base = str(values.get("__package__") or "").rsplit(".", level - 1)[0] if level else ""
        parts = ".".join(part for part in (base, name) if part).split(".")
        yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


_BY_NAME = {"getattr": 2, "hasattr": 2}  # which of its arguments is a name
_GLOBALS = frozenset(("globals", "eval", "exec"))
_COMPUTED = frozenset(("attrgetter", "methodcaller", "__getattribute__", "locals", *_GLOBALS))


@functools.lru_cache(4096)
def _computes_names(code: CodeType) -> bool:
    names = set(code.co_names)
    if names & _COMPUTED:
        return True
    if not names.intersection(_BY_NAME):
        return False
    seen = list(dis.get_instructions(code))
    starts = [at for at, each in enumerate(seen) if each.opname.startswith("LOAD_") and each.argval in _BY_NAME]
    return not all(_is_literal(seen, at) for at in starts)


def _is_literal(seen: list[dis.Instruction], at: int) -> bool:
    """True if the second argument of the function that is loaded there is a text in the code: no other instruction
    leaves two arguments on the stack before the call, as one that adds to a text would."""
    depth, found = 0, False
    for each in seen[at + 1 :]:
        if each.opname.startswith(("POP_JUMP", "JUMP", "RETURN", "STORE")):
            return found
        if each.opname in ("PRECALL", "CALL") and depth == each.arg:
            return found
        depth += dis.stack_effect(each.opcode, each.arg, jump=False)
        if depth == _BY_NAME[seen[at].argval]:
            found = each.opname == "LOAD_CONST" and isinstance(each.argval, str)
            if not found:
                return False
    return False


_IMPORT = dis.opmap["IMPORT_NAME"]


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _name(code: CodeType) -> str:
    return "a lambda" if code.co_name == "<lambda>" else code.co_name
