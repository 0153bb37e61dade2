"""What a batch is, told to other ranks: its signature, its size on all ranks, whether they hold the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.agreement import Agreement
from autopar.compiled import Compiled
from autopar.constraints import batch_ranks
from autopar.errors import BatchError
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.plan import MICROBATCH
from autopar.ir.program import record
from autopar.passes.search.intents import INTENTS
from autopar.torch_compat import TreeSpec, tree_flatten, tree_unflatten


def describe(leaves: Sequence[Any]) -> list[str]:
    """`argument 0 [12, 8] torch.int64` for each leaf of a batch; other values as they print."""
    shown = (f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    return [f"argument {i} {text}" for i, text in enumerate(shown)]


def signature_lines(model: nn.Module, train: bool, leaves: Sequence[Any], spec: TreeSpec) -> list[str]:
    """All that decides which program a call runs: what ranks must agree on."""
    evaluated = [name or "the root" for name, module in model.named_modules() if not module.training]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return [
        "forward_backward" if train else "forward",
        f"arguments {_structure(spec)}",
        *describe(leaves),
        f"in eval mode: {', '.join(evaluated) or 'nothing'}",
        f"frozen: {', '.join(frozen) or 'nothing'}",
    ]


class _Leaf:
    def __repr__(self) -> str:
        return "*"


def _structure(spec: TreeSpec) -> str:
    """`(*, {'x': *}, mask=*)`: a call with a star for each leaf."""
    args, kwargs = tree_unflatten([_Leaf()] * spec.num_leaves, spec)
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def at_global_size(batch: Any, mesh: Mesh) -> Any:
    """A local batch at the size that it has on all ranks together, on the meta device."""
    leaves, spec = tree_flatten(batch)
    ranks = batch_ranks(mesh)
    first = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != first:
            return leaf
        return torch.empty((leaf.shape[0] * ranks, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return tree_unflatten([grow(leaf) for leaf in leaves], spec)


def of_local_batch(layout: Layout) -> Layout:
    """The layout of a batch tensor within what a rank was given: only micro-batches are cut from it."""
    return Layout(tuple(tuple(f for f in dim if isinstance(f, int) or f == MICROBATCH) for dim in layout.dims))


def check_split(compiled: Compiled, leaves: Sequence[Any]) -> None:
    """Raise BatchError if the program takes other shapes than those of a local batch."""
    program = compiled.program
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.kind == "batch":
            given = tuple(leaves[int(entry.name)].shape)
            dims = tuple(tuple(f for f in dim if f != MICROBATCH) for dim in record(node).layout.dims)
            wanted = local_shape(record(node).type.shape, Layout(dims), program.mesh)
            if given != wanted:
                raise BatchError(
                    f"argument {entry.name} has shape {list(given)} on each rank, but the program takes {list(wanted)} "
                    f'of it: it cannot be split over the batch. Use batch="global".'
                )


def check_data(agreement: Agreement, leaves: Sequence[Any], coord: Mapping[str, int], local: bool) -> None:
    """Raise RankError if ranks that should hold the same data do not. Reads the whole batch: not for every step."""
    digests = [_digest(leaf) if isinstance(leaf, torch.Tensor) else "" for leaf in leaves]
    if not local:
        advice = 'Pass the same whole batch on every rank, or batch="local" if each rank loads a part of its own.'
        agreement.check_data(digests, "", advice)
        return
    split = {axis: place for axis, place in coord.items() if axis in INTENTS and INTENTS[axis].batch_split}
    whose = f"ranks of one {' and '.join(split)} coordinate" if split else "ranks"
    agreement.check_data(digests, str(split), f'With batch="local", {whose} pass the same part.')


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "meta"
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
