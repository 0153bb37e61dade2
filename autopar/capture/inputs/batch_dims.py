"""Which dim of each tensor of a call counts the samples: as the user says it for the arguments, and by leaf.

batch_dims=1                                         every tensor
batch_dims=(0, 1, None)                              by position; None: it has no samples, all ranks share it
batch_dims={"x": 0, "position_ids": 1, "scale": None}  by name
batch_dims=({"ids": 0, "mask": 1}, 0)                an argument that is a container: a dim for all of it, or again
                                                     a tuple or dict
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.inputs.containers import Form, Leaf, Node, Parts, take_call_apart
from autopar.errors import BatchError

Dims = tuple[int | None, ...]  # by leaf of a call
UNKNOWN = "?"
_UNSAID = object()


def parameter_names(function: Callable[..., Any], behind: int) -> tuple[str, ...]:
    """What a function calls its arguments, in order; those behind the first `behind`."""
    with suppress(TypeError, ValueError):  # no signature
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = [name for name, each in inspect.signature(function).parameters.items() if each.kind not in several]
        return tuple(found[behind:])
    return ()


def dims_of(said: Any, parts: Parts, names: Sequence[str], others: Sequence[str] = ()) -> Dims:
    """The dim of each leaf of a call. names: of the function's arguments. others: names of arguments of another one,
    for which something may be said, too.

    Raises BatchError, with all faults at once.
    """
    reader = _Reader(parts)
    top = dict(_arguments(parts))
    if isinstance(said, (Mapping, tuple, list)):
        reader.arguments(said, top, names, others)
    else:
        for key, form in top.items():
            reader.read(form, said, f"batch_dims={said!r}", _path(key), is_own=False)
    reader.check(said)
    return tuple(reader.dims)


def dims_of_call(
    said: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[..., Any], behind: int
) -> Dims | None:
    """The dims of arguments as they are; None where nothing was said. function, behind: see `parameter_names`."""
    return None if said is None else dims_of(said, take_call_apart(args, kwargs), parameter_names(function, behind))


def keys_of(parts: Parts) -> list[int | str]:
    """The arguments of a call, by position or name."""
    return [key for key, _ in _arguments(parts)]


def dims_by_key(said: Mapping[int | str, Any], parts: Parts) -> Dims:
    """The dims by what was said of each argument, by `keys_of`."""
    reader = _Reader(parts)
    for key, form in _arguments(parts):
        reader.read(form, said[key], f"batch_dims[{key!r}]", _path(key), is_own=True)
    reader.check(said)
    return tuple(reader.dims)


def spelled(parts: Parts, dims: Sequence[Any], names: Sequence[str] = ()) -> str:
    """Dims by leaf as a user writes them for the call: `batch_dims=(0, {'x': 0, 'y': 1}, None)`. names: to write by."""
    found = iter(dims)
    texts: dict[int | str, str] = {}
    for key, form in _arguments(parts):
        texts[names[key] if isinstance(key, int) and key < len(names) else key] = _text(form, found)
    if all(isinstance(key, int) for key in texts):
        comma = "," if len(texts) == 1 else ""
        return f"batch_dims=({', '.join(texts.values())}{comma})"
    if any(isinstance(key, int) for key in texts):
        begin = ", ".join(text for key, text in texts.items() if isinstance(key, int))
        rest = ", ".join(f"{key}: {text}" for key, text in texts.items() if isinstance(key, str))
        return f"batch_dims=({begin}, ...), with {rest} in the places of these arguments"
    return f"batch_dims={{{', '.join(f'{key!r}: {text}' for key, text in texts.items())}}}"


def shown(parts: Parts, dims: Sequence[Any]) -> str:
    """Each tensor with its dim, for messages: `argument 0 [5, 4, 6] dim 1, argument 1 [3] shared by all ranks`."""
    tensors = [(i, leaf) for i, leaf in parts.tensors()]
    said = [f"dim {dims[i]}" if dims[i] is not None else "shared by all ranks" for i, _ in tensors]
    pairs = zip(tensors, said, strict=True)
    return ", ".join(f"{parts.paths[i]} {list(leaf.shape)} {text}" for (i, leaf), text in pairs)


def guessed(parts: Parts) -> list[Any]:
    """What may be meant, by leaf: the dim whose size most tensors have in front; UNKNOWN where that does not tell."""
    guessed: list[Any] = [None] * len(parts.leaves)
    sizes = [leaf.shape[0] for _, leaf in parts.tensors() if leaf.ndim]
    size = max(sizes, key=sizes.count, default=None)
    for i, leaf in parts.tensors():
        fits = [dim for dim, each in enumerate(leaf.shape) if each == size]
        if leaf.ndim:
            guessed[i] = fits[0] if len(fits) == 1 else UNKNOWN
    return guessed


@dataclass(slots=True)
class _Reader:
    """Goes through what was said and the arguments side by side, leaf by leaf in their order."""

    parts: Parts
    dims: list[int | None] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def arguments(self, said: Any, top: Mapping[int | str, Form], names: Sequence[str], others: Sequence[str]) -> None:
        by_name, used = isinstance(said, Mapping), set()
        for key, form in top.items():
            if by_name:
                at: Any = key if isinstance(key, str) else names[key] if key < len(names) else None
                known = at in said
            else:
                at = key if isinstance(key, int) else names.index(key) if key in names else len(said)
                known = at < len(said)
            used.add(at)
            self.read(form, said[at] if known else _UNSAID, f"batch_dims[{at!r}]", _path(key), is_own=True)
        if by_name:  # an argument that this call leaves out is no fault
            here = [*names, *(key for key in top if isinstance(key, str) and key not in names)]
            self.faults += [_no_argument(name, here) for name in said if name not in {*used, *here, *others}]
        elif len(said) > max(len(names), len(top)):
            self.faults.append(f"it has {len(said)} entries, and the call {len(top)} argument{'s'[: len(top) - 1]}.")

    def check(self, said: Any) -> None:
        """Raise BatchError with all faults."""
        if self.faults:
            faults = "\n".join(f"  {fault}" for fault in dict.fromkeys(self.faults))
            raise BatchError(f"batch_dims={said!r} does not fit the arguments:\n{faults}\n{ask(self.parts)}")

    def read(self, form: Form, said: Any, where: str, path: str, is_own: bool) -> None:
        """is_own: it was said of this very part, and not of a container around it."""
        if isinstance(form, Leaf):
            self._leaf(said, where, is_own)
        elif isinstance(form, Node):
            children = list(_children(form))
            if isinstance(said, Mapping):
                unknown = [key for key in said if key not in {name for name, _ in children}]
                for key in unknown:
                    names = ", ".join(repr(name) for name, _ in children)
                    self.faults.append(f"{where} says a dim of {key!r}, and {path} has {names or 'nothing'}.")
                for name, child in children:
                    inner = said.get(name, _UNSAID)
                    self.read(child, inner, f"{where}[{name!r}]", f"{path}[{name!r}]", is_own=True)
            elif isinstance(said, (tuple, list)):
                if len(said) != len(children):
                    self.faults.append(f"{where} has {len(said)} entries, and {path} has {len(children)}.")
                for at, (name, child) in enumerate(children):
                    inner = said[at] if at < len(said) else None
                    self.read(child, inner, f"{where}[{at}]", f"{path}[{name!r}]", is_own=True)
            else:
                for name, child in children:
                    self.read(child, said, where, f"{path}[{name!r}]", is_own=False)

    def _leaf(self, said: Any, where: str, is_own: bool) -> None:
        at = len(self.dims)
        self.dims.append(None)
        leaf, path = self.parts.leaves[at], self.parts.paths[at]
        if not isinstance(leaf, torch.Tensor):
            if isinstance(said, (Mapping, tuple, list)):
                self.faults.append(f"{where} is {said!r}, and {path} is no container.")
            return
        shape = list(leaf.shape)
        if said is _UNSAID:
            if shape:
                self.faults.append(f"nothing is said of {path} {shape}.")
        elif isinstance(said, (Mapping, tuple, list)):
            self.faults.append(f"{where} is {said!r}, and {path} {shape} is one tensor.")
        elif said is not None and (shape or is_own):
            if -leaf.ndim <= said < leaf.ndim:
                self.dims[at] = said % leaf.ndim
            else:
                self.faults.append(f"{where} is dim {said}, and {path} {shape} has {leaf.ndim} dims.")


def _no_argument(name: Any, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    more = f"Do you mean {near[0]!r}?" if near else f"Its arguments are {', '.join(names) or 'not named'}."
    return f"the call has no argument {name!r}. {more}"


def _arguments(parts: Parts) -> Iterator[tuple[int | str, Form]]:
    """The arguments of a call, by position or name."""
    assert isinstance(parts.form, Node)
    given, named = parts.form.children
    assert isinstance(given, Node) and isinstance(named, Node) and named.keys is not None
    yield from enumerate(given.children)
    yield from zip(named.keys.values, named.children, strict=True)


def _children(node: Node) -> Iterator[tuple[Any, Form]]:
    """What a container holds, by key, place or attribute; of an object around a dict (UserDict) what is in that."""
    count = len(node.children) - len(node.attributes)
    keys = node.keys.values if node.keys is not None else range(count)
    yield from zip(keys, node.children[:count], strict=True)
    for name, child in zip(node.attributes, node.children[count:], strict=True):
        if name == "data" and isinstance(child, Node) and child.keys is not None:
            yield from _children(child)
        else:
            yield name, child


def _text(form: Form, found: Iterator[Any]) -> str:
    if isinstance(form, Leaf):
        return str(next(found))
    if not isinstance(form, Node):
        return "None"
    children = [(name, _text(child, found)) for name, child in _children(form)]
    if len({text for _, text in children}) <= 1:
        return children[0][1] if children else "None"
    if form.keys is not None or form.attributes:
        return f"{{{', '.join(f'{name!r}: {text}' for name, text in children)}}}"
    return f"({', '.join(text for _, text in children)})"


def _path(key: int | str) -> str:
    return f"argument {key}"


def ask(parts: Parts) -> str:
    """What may be written, as far as shapes tell."""
    text = spelled(parts, guessed(parts))
    asked = f", with a dim, or None for what all ranks share, in place of {UNKNOWN}" if UNKNOWN in text else ""
    return f"By the shapes it may be {text}{asked}."
