"""Take the arguments of a call apart into leaves and a form, and put a form together with other leaves.

Taken apart are the nodes of torch's pytree (lists, dicts, tuples, namedtuples, what libraries register there) and any
object that keeps what it has in attributes, or in a list, dict or tuple that it extends: transformers' BatchEncoding,
dataclasses, attrs classes, SimpleNamespace. The copy is of the same class, made without its `__init__`.
"""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from autopar.capture.inputs.arrays import as_array
from autopar.capture.inputs.leaves import Withheld, alike, key_of, refused, tensor_of, text_of, withheld
from autopar.errors import BatchError
from autopar.torch_compat import TreeSpec, tree_flatten, tree_unflatten

_BASES = (OrderedDict, defaultdict, dict, list, tuple, SimpleNamespace, object)  # what a class may extend in C

# What is made of its items by a call.
_CALLED: Mapping[type, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    slice: (lambda x: (x.start, x.stop, x.step), slice),
    partial: (lambda x: (x.func, x.args, x.keywords), lambda func, args, kwargs: partial(func, *args, **kwargs)),
    MappingProxyType: (lambda x: (dict(x),), MappingProxyType),
    torch.Size: (tuple, lambda *sizes: torch.Size(sizes)),
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, also of an array, whose dtype is then given; or a Python value."""

    is_tensor: bool
    array: np.dtype[Any] | None = None

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True)
class SeenAgain:
    """A tensor or container that stands in another place too: its number there."""

    number: int

    def __str__(self) -> str:
        return f"*{self.number}"


class DictKeys:
    """The keys of a dict, equal where types and values are."""

    __slots__ = ("compared", "values")

    def __init__(self, values: Sequence[Any], path: str) -> None:
        self.values, self.compared = tuple(values), tuple(map(key_of, values))
        if None in self.compared:
            kind = type(self.values[self.compared.index(None)]).__name__
            raise BatchError(f"{path} has a key of class {kind}: use text, numbers or tuples of them.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DictKeys) and self.compared == other.compared

    def __hash__(self) -> int:
        return hash(self.compared)


@dataclass(frozen=True, slots=True)
class Node:
    """A container: its items, then its attributes. spec: of a node of torch's pytree. factory: of a defaultdict."""

    kind: type
    children: tuple[Form, ...]
    keys: DictKeys | None = None
    attributes: tuple[str, ...] = ()
    spec: TreeSpec | None = field(default=None, hash=False)
    factory: Any = None

    def __str__(self) -> str:
        count = len(self.children) - len(self.attributes)
        items = [str(child) for child in self.children[:count]]
        if self.keys is not None:
            items = [f"{text_of(key)}: {item}" for key, item in zip(self.keys.values, items, strict=True)]
        items += [f"{n}={child}" for n, child in zip(self.attributes, self.children[count:], strict=True)]
        text = ", ".join(items)
        plain: dict[type, str] = {tuple: f"({text})", list: f"[{text}]", dict: f"{{{text}}}"}
        return plain.get(self.kind, f"{self.kind.__name__}({text})")


Form = Leaf | SeenAgain | Node


@dataclass(frozen=True, slots=True)
class Parts:
    """A value taken apart. `leaves`: its tensors (those of arrays too) and Python values. `paths`: where each stands,
    as an error says it. `form`: hashable, and equal to that of a value that differs in its leaves alone."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    form: Form

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The leaves that are tensors, with their places."""
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    def map(self, function: Callable[[torch.Tensor], Any]) -> Any:
        """The value with `function` of each tensor, or array as a tensor, in its place."""
        made = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return put_together(self.form, made)


def take_apart(value: Any, path: str = "the value", lenient: bool = False) -> Parts:
    """Raises BatchError for what no copy can be made of; `lenient` puts there what raises an error once it is read."""
    walk = _Walk(lenient)
    form = walk.form(value, path)
    return Parts(tuple(walk.leaves), tuple(walk.paths), form)


def take_call_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Parts:
    """The arguments of a call; put together they are `(args, kwargs)`."""
    walk = _Walk(False)
    given = tuple(walk.form(value, f"argument {i}") for i, value in enumerate(args))
    walk.number(kwargs)  # the dict of the call is put together like any other
    named = tuple(walk.form(value, f"argument {name}") for name, value in kwargs.items())
    inner = Node(tuple, given), Node(dict, named, DictKeys(tuple(kwargs), "the call"))
    return Parts(tuple(walk.leaves), tuple(walk.paths), Node(tuple, inner))


def put_together(form: Form, leaves: Sequence[Any]) -> Any:
    """The value of a form with these leaves."""
    return _Assembly(iter(leaves), []).value(form)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A copy of any container with `function` of each tensor, or array as a tensor, in its place."""
    return take_apart(value).map(function)


def map_batch(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A copy of a batch with `function` of each tensor in its place, as a parameter where that was one, and with its
    attributes (tensors among them changed by `function`, too)."""
    return map_tensors(lambda tensor: alike(function(tensor), tensor, partial(map_tensors, function)), batch)


class _Walk:
    """Numbers tensors and containers in the order in which it meets them, as `_Assembly` does."""

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.numbers: dict[int, int] = {}  # of what may stand in several places, by id
        self.held: list[Any] = []  # so that ids stay their own
        self.open: set[int] = set()  # of the containers that are made after their items

    def form(self, value: Any, path: str) -> Form:
        if id(value) in self.open:
            raise BatchError(f"{path} holds itself: pass what is in it without the circle.")
        if id(value) in self.numbers:
            return SeenAgain(self.numbers[id(value)])
        try:
            return self._first(value, path)
        except BatchError:
            if not self.lenient:
                raise
        return self._leaf(Withheld(path, type(value).__name__), path)

    def _first(self, value: Any, path: str) -> Form:
        tensor = tensor_of(value, path)
        if tensor is not None:
            self.number(value)
            self.leaves.append(tensor)
            self.paths.append(path)
            return Leaf(True, None if isinstance(value, torch.Tensor) else value.dtype)
        value = withheld(value, path)
        plain = type(value)
        if plain not in (tuple, list, dict):
            if key_of(value) is not None and not isinstance(value, tuple):
                return self._leaf(value, path)
            if isinstance(value, io.IOBase) or hasattr(plain, "__next__"):
                raise refused(value, path)
            if plain in _CALLED:
                return self._node(value, path, _CALLED[plain][0](value), None)
        items, spec = _flat(value)
        if spec is None and not _can_be_made(plain):
            raise refused(value, path)
        return self._node(value, path, _items(value) if spec is None else items, spec)

    def _leaf(self, value: Any, path: str) -> Leaf:
        self.leaves.append(value)
        self.paths.append(path)
        return Leaf(False)

    def number(self, value: Any) -> None:
        """Count what may stand in other places too."""
        self.numbers[id(value)] = len(self.held)
        self.held.append(value)

    def _node(self, value: Any, path: str, items: Sequence[Any], spec: TreeSpec | None) -> Node:
        kind = type(value)
        is_called = kind in _CALLED
        is_dict = isinstance(value, Mapping) and (spec is not None or isinstance(value, dict))
        keys = DictKeys(tuple(value), path) if is_dict and len(value) == len(items) else None
        attributes = {} if spec is not None or is_called else _attributes(value)
        is_late = spec is not None or is_called or isinstance(value, tuple)
        if not isinstance(value, tuple):  # of equal tuples Python may make one
            self.number(value)
        if is_late:
            self.open.add(id(value))
        names = keys.values if keys is not None else range(len(items))
        fields = getattr(kind, "_fields", None) if isinstance(value, tuple) else None
        steps = [f".{name}" for name in fields] if fields else [f"[{text_of(name)}]" for name in names]
        children = [self.form(item, path + step) for step, item in zip(steps, items, strict=True)]
        for name, item in attributes.items():
            is_inner = isinstance(value, UserDict) and name == "data"
            children.append(self.form(item, path if is_inner else f"{path}.{name}"))
        self.open.discard(id(value))
        factory = getattr(value, "default_factory", None) if isinstance(value, defaultdict) else None
        return Node(kind, tuple(children), keys, tuple(attributes), spec, factory)


@dataclass(slots=True)
class _Assembly:
    leaves: Iterator[Any]
    made: list[Any]  # by number

    def value(self, form: Form) -> Any:
        if isinstance(form, SeenAgain):
            return self.made[form.number]
        if isinstance(form, Leaf):
            leaf = next(self.leaves)
            if form.is_tensor:
                leaf = leaf if form.array is None else as_array(leaf, form.array)
                self.made.append(leaf)
            return leaf
        return self._container(form)

    def _container(self, node: Node) -> Any:
        number, is_tuple = len(self.made), issubclass(node.kind, tuple)
        if not is_tuple:
            self.made.append(None)
        count = len(node.children) - len(node.attributes)
        if node.spec is not None or is_tuple or node.kind in _CALLED:
            children = [self.value(child) for child in node.children]
            items, rest = children[:count], children[count:]
            made = _made(node, items)
            if not is_tuple:
                self.made[number] = made
        else:
            made = self.made[number] = _shell(node.kind)
            children = [self.value(child) for child in node.children]
            items, rest = children[:count], children[count:]
            _fill(made, node, items)
        for name, value in zip(node.attributes, rest, strict=True):
            object.__setattr__(made, name, value)
        return made


def _made(node: Node, items: list[Any]) -> Any:
    """What is made after its items."""
    if node.kind in _CALLED:
        return _CALLED[node.kind][1](*items)
    return tree_unflatten(items, node.spec) if node.spec is not None else tuple.__new__(node.kind, items)


def _flat(value: Any) -> tuple[list[Any], TreeSpec | None]:
    """The items of a node of torch's pytree, of one level; no spec for what is none."""
    if type(value) is object:
        return [], None
    levels = iter((False,))
    items, spec = tree_flatten(value, is_leaf=lambda _: next(levels, True))
    is_none = len(items) == 1 and items[0] is value and spec.is_leaf()
    return items, None if is_none else spec


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, (list, tuple)) else []


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of the object itself, in its `__dict__` and in slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and name != "__dict__":
                with suppress(AttributeError):  # not set
                    attributes[name] = slot.__get__(value)
    return attributes


def _base(kind: type) -> Any:
    return next(base for base in kind.__mro__ if base in _BASES)


def _shell(kind: type) -> Any:
    return _base(kind).__new__(kind)


def _can_be_made(kind: type) -> bool:
    try:
        _shell(kind)
    except TypeError:  # "object.__new__(X) is not safe": what it holds is known to its own code in C alone
        return False
    return True


def _fill(made: Any, node: Node, items: list[Any]) -> None:
    base = _base(node.kind)
    if isinstance(made, defaultdict):
        made.default_factory = node.factory
    if isinstance(made, dict) and node.keys is not None:
        for key, item in zip(node.keys.values, items, strict=True):
            base.__setitem__(made, key, item)
    elif isinstance(made, list):
        list.extend(made, items)
