"""Batch signatures, and the checks that all ranks were given the same batch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture import tables
from autopar.capture.containers import Form, Node, Parts
from autopar.capture.leaves import key_of, text_of
from autopar.capture.spots import Numbers
from autopar.capture.stand_in import is_number
from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import MICROBATCH
from autopar.ir.program import record
from autopar.parallel.agreement import Agreement
from autopar.runtime import host


def describe(parts: Parts) -> list[str]:
    """`argument 0 [12, 8] torch.int64` for each leaf of a batch, `argument 1 float`; other values as they print."""
    return [f"{path} {_shown(leaf)}" for path, leaf in zip(parts.paths, parts.leaves, strict=True)]


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{list(leaf.shape)} {leaf.dtype}"
    return type(leaf).__name__ if is_number(leaf) else text_of(leaf)


def numbers_of(parts: Parts) -> Numbers:
    """The Python numbers among the arguments of a call, by leaf. They are guarded like any number that a step reads in
    Python, and so become inputs of its program where they change from call to call."""
    leaves = enumerate(zip(parts.paths, parts.leaves, strict=True))
    return {(i, path): leaf for i, (path, leaf) in leaves if is_number(leaf)}


def with_numbers(parts: Parts, numbers: Mapping[tuple[int, str], Any]) -> Parts:
    """The same arguments with these values, or stand-ins, for their numbers."""
    leaves = list(parts.leaves)
    for (i, _), number in numbers.items():
        leaves[i] = number
    return replace(parts, leaves=tuple(leaves))


def signature_of(parts: Parts) -> Hashable:
    """What a program is compiled for, of the arguments of a call: where tensors stand, their shapes and dtypes, the
    classes of numbers (`numbers_of`) and the other Python values beside them."""
    return parts.form, tuple(map(_kind, parts.leaves))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return type(leaf).__name__ if is_number(leaf) else key_of(leaf)


def signature_lines(model: nn.Module, parts: Parts) -> list[str]:
    """All that decides which program a call runs: what ranks must agree on."""
    evaluated = [name or "the root" for name, module in tables.named_modules(model) if not module.training]
    frozen = [name for name, parameter in tables.named_parameters(model) if not parameter.requires_grad]
    return [
        f"arguments {_call_text(parts.form)}",
        *describe(parts),
        f"in eval mode: {', '.join(evaluated) or 'nothing'}",
        f"frozen: {', '.join(frozen) or 'nothing'}",
    ]


def _call_text(form: Form) -> str:
    """`(*, {'x': *}, mask=*)`: a call with a star for each leaf."""
    assert isinstance(form, Node)
    args, kwargs = form.children
    assert isinstance(args, Node) and isinstance(kwargs, Node) and kwargs.keys is not None
    named = (f"{name}={value}" for name, value in zip(kwargs.keys.values, kwargs.children, strict=True))
    return f"({', '.join([*map(str, args.children), *named])})"


def in_order(kwargs: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the function's parameters: any order is the same call. Those that it takes as
    `**kwargs` keep theirs, which it can see."""
    if len(kwargs) < 2:
        return dict(kwargs)
    with suppress(TypeError, ValueError):  # no signature
        named = [name for name in inspect.signature(function).parameters if name in kwargs]
        return {name: kwargs[name] for name in dict.fromkeys((*named, *kwargs))}
    return dict(kwargs)


def at_global_size(parts: Parts, ranks: int) -> Any:
    """The arguments of a call; those of `ranks` local batches together are on the meta device."""
    first = next((leaf.shape[0] for _, leaf in parts.tensors() if leaf.ndim), None)

    def grow(leaf: torch.Tensor) -> torch.Tensor:
        if ranks == 1 or leaf.ndim == 0 or leaf.shape[0] != first:
            return leaf
        return torch.empty((leaf.shape[0] * ranks, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return parts.map(grow)


def of_local_batch(layout: Layout) -> Layout:
    """The layout of a batch tensor within what a rank was given: only micro-batches are cut from it."""
    return Layout(tuple(tuple(f for f in dim if isinstance(f, int) or f == MICROBATCH) for dim in layout.dims))


def check_split(compiled: Lowered, parts: Parts) -> None:
    """Raise BatchError if the program takes other shapes than those of a local batch."""
    program = compiled.program
    for node, entry in program.entries:
        if entry.kind == "batch":
            leaf = int(entry.name)
            given = tuple(parts.leaves[leaf].shape)
            dims = tuple(tuple(f for f in dim if f != MICROBATCH) for dim in record(node).layout.dims)
            wanted = local_shape(record(node).type.shape, Layout(dims), program.mesh)
            if given != wanted:
                raise BatchError(
                    f"{parts.paths[leaf]} has shape {list(given)} on each rank, but the program takes {list(wanted)} "
                    f'of it: it cannot be split over the batch. Use batch="global".'
                )


def off_host(parts: Parts) -> list[str]:
    """The paths of tensors that are compared one call later (see `Digests`)."""
    return [parts.paths[leaf] for leaf, tensor in parts.tensors() if not host.on_host(tensor)]


def tell_apart(
    agreement: Agreement, parts: Parts, late: Mapping[str, str], part: Mapping[str, int], is_local: bool, step: int
) -> None:
    """Raise RankError with the names of what differs between ranks that should hold the same data, and do not. late:
    digests of data that are there no longer, by name."""
    digests = {path: _digest(leaf) for path, leaf in zip(parts.paths, parts.leaves, strict=True)}
    if not is_local:
        advice = 'Pass the same whole batch on every rank, or batch="local" if each rank loads a part of its own.'
    else:
        whose = f"ranks of one {' and '.join(part)} coordinate" if part else "ranks"
        advice = f'With batch="local", {whose} pass the same part.'
    agreement.tell_apart({**digests, **late}, str(part), f"at step {step}", advice)


def _digest(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return ""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
