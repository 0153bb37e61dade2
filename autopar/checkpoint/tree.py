"""State as JSON: nested containers of numbers, text and tensors, written so that they come back of the same types.

Plain JSON values stand for themselves. All else is an object with the key "!", which names its type:
`{"!": "tuple", "of": [1, 2]}`, `{"!": "tensor", "of": "optimizer/0.weight/exp_avg"}`. Nothing that is read runs code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from autopar.errors import CheckpointError

Take = Callable[[torch.Tensor, str], Any]  # what stands for a tensor, given with the path to it
Give = Callable[[Any], Any]  # the inverse

_KIND = "!"
_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "size": torch.Size,
}  # fmt: skip
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {
    kind: name
    for name, kind in [*((n, k) for n, k in _SEQUENCES.items()), *((n, k) for n, k in _MAPPINGS.items())]
}  # fmt: skip


def encode(value: Any, take: Take, path: str) -> Any:
    """Turn a value into JSON; `take` gives what stands for a tensor. Raises CheckpointError for what has no form."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", "of": take(value, path)}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {_KIND: "array", "of": take(torch.from_numpy(numpy.ascontiguousarray(value)), path)}
    if isinstance(value, numpy.generic):
        return encode(value.item(), take, path)
    if kind is list:
        return [encode(each, take, _inside(path, at)) for at, each in enumerate(value)]
    if kind in _NAMES and _NAMES[kind] in _SEQUENCES:
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        of = [encode(each, take, _inside(path, at)) for at, each in enumerate(ordered)]
        return {_KIND: _NAMES[kind], "of": of}
    if kind in _NAMES:
        # keys that are text make an object of JSON, others a list of pairs
        if kind is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: encode(each, take, _inside(path, key)) for key, each in value.items()}
        pairs = [[encode(k, take, path), encode(v, take, _inside(path, k))] for k, v in value.items()]
        return {_KIND: _NAMES[kind], "of": pairs}
    if kind in (float, complex):
        return {_KIND: kind.__name__, "of": repr(value)}
    if kind is bytes:
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if kind in (torch.dtype, torch.device):
        return {_KIND: kind.__name__, "of": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"'{path}' is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint has no form for: it holds "
        f"tensors, numbers, text, and lists, tuples, dicts and sets of them, and no pickle. Leave it out, or give its "
        f"values (its own state_dict())."
    )


def decode(tree: Any, give: Give) -> Any:
    """Turn JSON back into the value. Raises ValueError for what `encode` does not write."""
    if isinstance(tree, list):
        return [decode(each, give) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if _KIND not in tree:
        return {key: decode(each, give) for key, each in tree.items()}
    kind: Any = tree[_KIND]
    of: Any = tree.get("of")
    try:
        if kind == "tensor":
            return give(of)
        if kind == "array":
            return give(of).numpy()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(each, give) for each in of)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({decode(key, give): decode(value, give) for key, value in of})
        if kind in ("float", "complex"):
            return (float if kind == "float" else complex)(of)
        if kind == "bytes":
            return base64.b64decode(of, validate=True)
        if kind == "device":
            return torch.device(of)
        if kind == "dtype":
            return dtype_of(of)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"a value of type '{str(kind)[:40]}' does not read: {str(error)[:200]}") from None
    raise ValueError(f"there is no type '{str(kind)[:40]}' in a checkpoint")


def tensors_of(tree: Any) -> list[Any]:
    """What stands for the tensors of a tree, in their order."""
    if isinstance(tree, list):
        return [each for inner in tree for each in tensors_of(inner)]
    if not isinstance(tree, dict):
        return []
    if tree.get(_KIND) in ("tensor", "array"):
        return [tree.get("of")]
    return [each for inner in tree.values() for each in tensors_of(inner)]


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name without `torch.`. Raises ValueError."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype '{str(name)[:40]}'")
    return found


def inline(tensor: torch.Tensor, path: str) -> dict[str, Any]:
    """Write a small tensor into the tree itself: what each rank has for itself."""
    value = tensor.detach().cpu().contiguous()
    data = base64.b64encode(value.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def outline(of: Any) -> torch.Tensor:
    """The inverse of `inline`."""
    data = bytearray(base64.b64decode(of["data"], validate=True))
    flat = (
        torch.frombuffer(data, dtype=dtype_of(of["dtype"]))
        if data
        else torch.empty(0, dtype=dtype_of(of["dtype"]), device="cpu")
    )
    return flat.reshape(of["shape"]).clone()


def _inside(path: str, key: object) -> str:
    return f"{path}/{key}"
