"""Trace each node to the module that ran, the user's line, and the forward or backward pass.

Forward hooks follow the module path; each torch function that runs leaves its place on the autograd nodes that it
made, and the backward of such a node is charged to the same place. The place travels to the graph's nodes by way
of torch.fx's stack trace field.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

_SEPARATOR, _EXACT = "\x1f", "exact"
_HERE = str(Path(os.path.abspath(__file__)).parents[2])  # all of autopar
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_INTERNAL = tuple(
    path + os.sep for path in (_HERE, _TORCH, *(os.path.join(os.path.dirname(_HERE), p) for p in ("passes", "runtime")))
)
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages"))
# Code without a file is the user's, of a notebook, a prompt or exec under any name, but for what machinery writes.
_WRITTEN = ("<frozen", "<eval_with_key", "<autopar", "<torch", "<__array_function__")

Line = tuple[str, int]
Place = tuple[str, str, str]  # module path, source line, and "exact" where the user turned autocast off


@functools.cache
def is_user_file(filename: str) -> bool:
    """True for a file that is neither torch's nor autopar's nor Python's own machinery."""
    if filename.startswith(_PYTHON) and not filename.startswith(_PACKAGES):
        return False
    return not filename.startswith(_INTERNAL) and not filename.startswith("<")


def is_typed(filename: str) -> bool:
    """True for code of the user's that stands in no file."""
    return filename.startswith("<") and not filename.startswith(_WRITTEN)


def is_user_code(frame: FrameType) -> bool:
    """True for a frame of the user's, in a file or not."""
    return is_user_file(frame.f_code.co_filename) or is_typed(frame.f_code.co_filename)


def user_frame(frame: FrameType | None) -> Line | None:
    """File and line of the innermost frame of the user's; where the model's own are in no file, of that of a prompt."""
    typed = None
    while frame is not None and not (typed and _is_call_of_model(frame.f_code)):
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        if typed is None and is_typed(frame.f_code.co_filename):
            typed = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return typed


def _is_call_of_model(code: CodeType) -> bool:
    """True for `tables.functional_call`, above which stands who asked for the capture."""
    return code.co_name == "functional_call" and code.co_filename.startswith(_HERE)


def user_line(frame: FrameType | None) -> str:
    """`gpt.py:41` of the innermost frame of the user's."""
    found = user_frame(frame)
    return f"{os.path.basename(found[0])}:{found[1]}" if found else ""


class Locator:
    """Keeps the current place during a trace and marks the nodes made there."""

    def __init__(self) -> None:
        self.stack: list[str] = [""]
        self.phase = "forward"
        self._known: set[Any] = set()
        self._backward: Place = ("", "", "")
        self.exact = False  # the user turned autocast off here
        self._files: dict[str, str] = {}

    @contextmanager
    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Follow which one of the modules runs, by their paths."""
        handles = []
        for path, module in modules:

            def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                self.stack.append(path)

            def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
                self.stack.pop()

            handles.append(nn.Module.register_forward_pre_hook(module, enter, prepend=True))
            handles.append(nn.Module.register_forward_hook(module, leave, always_call=True))
        try:
            with fx_traceback.preserve_node_meta():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def mark(self) -> Place:
        """Charge the nodes made from now on to the current module and the user's current line.

        In the backward pass only what a module computes again has a place of its own.
        """
        if self.phase == "backward" and len(self.stack) == 1:
            return self._backward
        line = user_frame(sys._getframe(1))
        source = f"{os.path.basename(line[0])}:{line[1]}" if line else ""
        if line:
            self._files[source] = line[0]
        place = (self.stack[-1], source, _EXACT if self.exact else "")
        fx_traceback.set_stack_trace([_SEPARATOR.join((self.phase, *place))])
        return place

    def line(self, source: str) -> Line | None:
        """The whole file name, and the line, of a place such as `gpt.py:41`."""
        return (self._files[source], int(source.rpartition(":")[2])) if source in self._files else None

    @property
    def backward_line(self) -> Line | None:
        """The line whose backward pass runs, if any does."""
        return self.line(self._backward[1]) if self.phase == "backward" else None

    def adopt(self, result: Any, place: Place) -> None:
        """Charge the backward of all autograd nodes behind `result` that are new to `place`."""
        own = weakref.ref(self)  # C++ holds hooks: one that held the locator would keep all nodes for ever
        for item in result if isinstance(result, (tuple, list)) else (result,):
            history = _history(item) if isinstance(item, torch.Tensor) else None
            pending = [history] if history is not None else []
            while pending:
                grad_fn = pending.pop()
                if grad_fn in self._known:
                    continue
                self._known.add(grad_fn)
                grad_fn.register_prehook(partial(_enter_backward, own, place))
                pending += [parent for parent, _ in grad_fn.next_functions if parent is not None]

    def enter_backward(self, place: Place) -> None:
        """Charge what is made from now on to a line's backward. What a loss needs of a gradient is forward."""
        self._backward = place
        fx_traceback.set_stack_trace([_SEPARATOR.join((self.phase, *place))])


def _history(tensor: torch.Tensor) -> Any:
    """The autograd node of a tensor; None too for a view that was made and written under no_grad(), which torch refuses
    where one is needed."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _enter_backward(locator: weakref.ref[Locator], place: Place, _grads: Any) -> None:
    found = locator()
    if found is not None:
        found.enter_backward(place)


def place_of(node: fx.Node) -> tuple[str, str, str]:
    """(phase, module path, source line) of a traced node."""
    phase, module, source, _ = _parts(node)
    return phase, module, source


def is_exact(node: fx.Node) -> bool:
    """True for a node of a region in which the user turned autocast off."""
    return _parts(node)[3] == _EXACT


def _parts(node: fx.Node) -> list[str]:
    parts = (node.meta.get("stack_trace") or "").split(_SEPARATOR)
    return parts if len(parts) == 4 else ["forward", "", "", ""]
