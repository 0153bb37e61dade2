"""Other models that a loss function calls: found while it is traced, their tensors are inputs of the program.

A module that is called and is no part of the model ends the trace (`UnknownPartner`) and joins it; the next trace
knows it. A parallel one asks the trace for the module to run in its place (`inlined`), as a torch function asks a mode.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

from autopar.capture.inputs import tables
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import Line, user_frame
from autopar.errors import CaptureError
from autopar.ir.program import PARTNER

_PART = Construct(
    "a part of another parallel model ({}), called by itself",
    "Its weights lie on all ranks: call the parallel model itself, which knows where.",
)
_MADE = Construct(
    "a module ({}) with parameters that is made in the loss function",
    "No optimizer knows it, and a compiled step never makes it again: make it once, outside.",
)
_MADE_IN_FORWARD = Construct(
    "a module ({}) with parameters that is made or copied in forward",
    "No optimizer knows it, and a compiled step never makes it again: make it once, in __init__. What a part gives "
    "with its weights of now and no gradients to them is torch.func.functional_call(part, {name: weight.detach() "
    "for name, weight in part.named_parameters()}, inputs).",
)


class Inlined(nn.Module):
    """A module that holds a rank's part of `original`; while another model's step is traced, that runs in its place."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple, so that it is no submodule and names stay as they are

    @property
    def original(self) -> nn.Module:
        """The user's module, whose parameters are DTensors."""
        return self._original[0]


@dataclass(frozen=True, slots=True)
class Partner:
    """Another model in a loss. `module` is what was called: a plain module, or a parallel one."""

    name: str
    module: nn.Module

    @property
    def traced(self) -> nn.Module:
        """The module whose forward is traced."""
        return self.module.original if isinstance(self.module, Inlined) else self.module

    @property
    def flags(self) -> tuple[bool, ...]:
        """What a program was compiled for: which modules train, which parameters need gradients."""
        training = tuple(module.training for module in tables.modules(self.traced))
        return training + tuple(parameter.requires_grad for parameter in tables.parameters(self.traced))


class UnknownPartner(BaseException):
    """Ends a trace at the first call of a partner. No error: a user's `except Exception` must not stop it."""

    def __init__(self, module: nn.Module, line: Line | None, is_in_forward: bool) -> None:
        super().__init__()
        self.module, self.line, self.is_in_forward = module, line, is_in_forward


def inlined(parallel: Inlined) -> nn.Module | None:
    """The module to run in place of a parallel one that is called while a step is traced; None outside of traces."""
    if not is_traced(parallel):
        return None
    module: nn.Module | None = handle_torch_function(inlined, (), parallel)
    return module


def is_traced(parallel: Inlined) -> bool:
    """Whether a step is traced meanwhile, of which a parallel model may be a part."""
    return bool(has_torch_function((parallel,)))


class Partners:
    """The partners of a model in one capture. `known`: in the order in which they were met."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.known: dict[str, Partner] = {}
        self._lines: dict[str, tuple[str, Line | None]] = {}
        self._inside = {id(module) for module in tables.modules(model)}
        self._own = {id(parameter) for _, parameter in tables.named_parameters(model)}  # which a plain module may share
        self._passing: set[tuple[str, Line | None]] = set()  # modules that the loss function makes at each call
        self._met: set[int] = set()
        self._gone: list[Partner] = []
        self._running: Sequence[str] = ("",)

    def all_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules that may run, by path."""
        yield from tables.named_modules(self.model)
        for partner in self.known.values():
            yield from tables.named_modules(partner.traced, prefix=partner.name)

    def submodule(self, path: str) -> nn.Module:
        """The module of a path."""
        return dict(self.all_modules())[path]

    def all_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All buffers, under each of their names."""
        yield from tables.named_buffers(self.model, remove_duplicate=False)
        for partner in self.known.values():
            yield from tables.named_buffers(partner.traced, prefix=partner.name, remove_duplicate=False)

    @contextmanager
    def watch(self, running: Sequence[str]) -> Iterator[None]:
        """Look at each module that is called; raises UnknownPartner for a new one. running: the paths of those that
        run, behind that of the loss function."""
        self._met.clear()
        self._running = running
        handle = register_module_forward_pre_hook(self._called)
        try:
            yield
        finally:
            handle.remove()

    def add(self, found: UnknownPartner) -> Partner | None:
        """A new partner; None for a module that is made at each call and holds nothing to train."""
        key = _kind(found.module), found.line
        before = [p for p in self.known.values() if self._lines[p.name] == key and id(p.module) not in self._met]
        if before:  # it was called here when the trace came by last, and now there is another one
            if any(parameter.requires_grad for parameter in tables.parameters(found.module)):
                made = _MADE_IN_FORWARD if found.is_in_forward else _MADE
                raise refusal(Construct(made.name.format(type(found.module).__name__), made.instead), found.line)
            self._passing.add(key)
            self._gone.append(self.known.pop(before[0].name))  # held, so that its id stays its own
            return None
        partner = Partner(self._name_of(found.module), found.module)
        self.known[partner.name], self._lines[partner.name] = partner, key
        self._inside.update(id(module) for module in tables.modules(partner.traced))
        return partner

    def met(self, parallel: Inlined) -> nn.Module:
        """The module to run where a parallel one is called. Raises UnknownPartner for one that is new."""
        if id(parallel.original) not in self._inside:
            raise UnknownPartner(parallel, user_frame(sys._getframe(1)), len(self._running) > 1)
        self._met.add(id(parallel))
        return parallel.original

    def _called(self, module: nn.Module, _args: Any) -> None:
        self._met.add(id(module))
        if id(module) in self._inside or isinstance(module, Inlined):
            return
        new = [part for part in tables.modules(module) if id(part) not in self._inside]
        tensors = [tensor for part in new for tensor in (*tables.parameters(part, False), *tables.buffers(part, False))]
        line = user_frame(sys._getframe(1))
        if not tensors or (_kind(module), line) in self._passing:
            return  # it holds nothing, or it is a new container of the model's own parts
        if any(module is made for made in tables.modules(self.model)):
            return  # it was made while the model runs, which is refused after the trace
        if any(isinstance(tensor, DTensor) and id(tensor) not in self._own for tensor in tensors):
            raise refusal(Construct(_PART.name.format(type(module).__name__), _PART.instead), line)
        raise UnknownPartner(module, line, len(self._running) > 1)

    def _name_of(self, module: nn.Module) -> str:
        """`@D` for a module that the loss function knows as D."""
        names = (name for name, value in variables(self.loss_fn) if value is module)
        base = PARTNER + next(names, type(module).__name__)
        found, count = base, 1
        while found in self.known:
            count += 1
            found = f"{base}{count}"
        return found


def check_plain(parallel: Inlined) -> None:
    """Raise CaptureError for a parallel model that is called where a plain step runs for comparison."""
    raise CaptureError(
        f"the loss function calls a parallel model ({type(parallel.original).__name__}) where a plain step runs beside "
        f"the programs: give verify a loss function of plain modules."
    )


def _kind(module: nn.Module) -> str:
    """The name of its class: a step that makes a class, as torch.fx does for each GraphModule, makes another one each
    time."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def variables(function: Any) -> Iterator[tuple[str, Any]]:
    """The names that a function's code reads from outside of it, with their values; of a method also its owner's."""
    if isinstance(function, nn.Module):
        yield "loss_fn", function
        return
    while isinstance(function, functools.partial):
        yield from function.keywords.items()
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from {**vars(owner), **getattr(owner, "_modules", {})}.items()
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from {**found.globals, **found.nonlocals}.items()
        defaults = function.__defaults__ or ()
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
