"""Paths of modules: patterns as a user writes them (`blocks.0-3`, `*.mlp`), and the layer that a path lies in."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from torch import fx

from autopar.ir.program import Program, record

_NUMBER = re.compile(r"(?<![^.'])\d+(?![^.'])")  # a word of a path
_RANGE = re.compile(r"(\d+)-(\d+)\Z")


def module_paths(program: Program, nodes: Iterable[fx.Node]) -> list[str]:
    """The modules that some nodes belong to or that have parameters, and those around them."""
    module_paths: dict[str, None] = {}
    own = [name.rpartition(".")[0] for entry in program.inputs if entry.kind == "parameter" for name in entry.names]
    for path in [*(record(node).module for node in nodes), *own]:
        parts = path.split(".") if path else []
        module_paths.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return list(module_paths)


def spelled_out(pattern: str) -> list[str]:
    """`blocks.0-3` as its four patterns."""
    spelled_out = [""]
    for word in pattern.split("."):
        match = _RANGE.match(word)
        words = [str(i) for i in range(int(match[1]), int(match[2]) + 1)] if match else [word]
        spelled_out = [f"{path}.{one}" if path else one for path in spelled_out for one in words]
    return spelled_out


def in_module(path: str, pattern: str) -> bool:
    """True for the module of a pattern, and for what it holds."""
    depth = pattern.count(".") + 1
    return fnmatch.fnmatchcase(".".join(path.split(".")[:depth]), pattern) and path.count(".") + 1 >= depth


def is_named(path: str, pattern: str) -> bool:
    """True for the module of a pattern with ranges, `blocks.0-3`, and for what it holds; `*` is all."""
    return pattern == "*" or any(in_module(path, one) for one in spelled_out(pattern))


def unknown_pattern(pattern: str, paths: Sequence[str]) -> str:
    """What is wrong with a pattern that names no module of these; "" if it names some."""
    patterns = spelled_out(pattern)
    missing = [one for one in patterns if one != "*" and not any(in_module(path, one) for path in paths)]
    if not missing:
        return ""
    near = ", ".join(repr(path) for path in nearest(missing[0], paths))
    which = "" if patterns == [pattern] else f" ({', '.join(repr(one) for one in missing[:3])})"
    return f"the pattern '{pattern}' names no module{which}. Nearest names: {near}."


@lru_cache(1 << 14)  # each pass asks of each node
def layer_of(path: str) -> str:
    """The outermost member of a list of modules on a path: `blocks.3` of `blocks.3.mlp.0`; "" if there is none."""
    words = path.split(".")
    place = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return "" if place is None else ".".join(words[: place + 1])


def unit_of(path: str) -> str:
    """The layer of a path, or what is outermost on it where it lies in none: `head` of `head.norm`."""
    return layer_of(path) or path.partition(".")[0]


def any_layer(text: str) -> str:
    """A path, or a text with one between quotes, with `*` for the number of its layer."""
    return _NUMBER.sub("*", text, 1)


def nearest(name: str, paths: Sequence[str]) -> list[str]:
    """Up to three of the paths, those spelled most like `name` first."""
    return difflib.get_close_matches(name, paths, n=3, cutoff=0.3) or sorted(paths)[:3]
