"""The names of the ops in text, and the allow-list by which a name becomes an op again.

Reading a program runs no code from it: a name is looked up here, never imported or evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.errors import ArtifactError
from autopar.ir import ops

PYTHON: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.mul": operator.mul,
}
_NAMESPACES = ("aten", ops.NAMESPACE)
# aten ops that touch files or the terminal; no training step needs them
_REFUSED = frozenset({"from_file", "save", "warn", "_print"})
_NAME = re.compile(r"(\w+)\.(\w+)\.(\w+)\Z")
_PACKET = type(torch.ops.aten.add)
_OVERLOAD = type(torch.ops.aten.add.Tensor)
_PYTHON_NAMES = {function: name for name, function in PYTHON.items()}


def target_name(target: Any) -> str:
    """The name of an op in text, e.g. `aten.mul.Tensor`, `autopar.contract.default`, `operator.getitem`."""
    if isinstance(target, _OVERLOAD):
        return str(target)
    return _PYTHON_NAMES.get(target) or f"{target.__module__}.{target.__qualname__}"


@cache
def find_target(name: str) -> Callable[..., Any]:
    """The op of a name on the allow-list; raises `ArtifactError` for every other name."""
    if name in PYTHON:
        return PYTHON[name]
    match = _NAME.match(name)
    if match and match[1] in _NAMESPACES and match[2] not in _REFUSED:
        # getattr on torch.ops also finds Python's own attributes (`__class__`), hence the type checks
        packet = getattr(getattr(torch.ops, match[1]), match[2], None)
        if isinstance(packet, _PACKET) and match[3] in packet.overloads():
            overload = getattr(packet, match[3])
            if isinstance(overload, _OVERLOAD):
                return overload
    raise ArtifactError(
        f"'{name}' is not an op that a program may hold: these are the ops of aten and autopar, "
        f"and {', '.join(sorted(PYTHON))}."
    )
