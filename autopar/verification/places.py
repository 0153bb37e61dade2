"""The batches that `verify` trains on: the global one, or with `ddp` one for each place of the data axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.batch_dims import dims_of_call
from autopar.capture.containers import Parts, put_together, take_call_apart
from autopar.compiler.compile import batch_arguments
from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError
from autopar.ir.mesh import Mesh
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Fixed
from autopar.parallel.auto_options import check_own
from autopar.parallel.local_batch import place_of
from autopar.verification.comparison import Key

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # of the loss function, behind the model
Batches = tuple[Arguments, ...]  # by place; a global batch is of one


def places_of(mesh: Mesh) -> list[int]:
    """The place of each rank among those that have batches of their own."""
    return [place_of(mesh, coord) for coord in mesh.coords()]


def batches_of(
    batch: Any, mesh: Mesh, options: StepOptions, function: Callable[..., Any], behind: int, is_own: bool
) -> Batches:
    """The batch of each place: of a list the place's own, of all else the place's share of samples, as even as can be.

    function, behind: whose arguments these are, as of `dims_of_call`. Raises BatchError for a list of another length,
    for fewer samples than places, and for batches that differ in more than sizes.
    """
    if not is_own:
        return (batch_arguments(batch),)
    check_own("ddp", mesh, options)
    places = max(places_of(mesh)) + 1
    if isinstance(batch, list):
        if len(batch) != places:
            raise BatchError(
                f"verify(ddp=True): the list has {len(batch)} batches, but mesh '{mesh}' has {places} places on its "
                f"data axes. Write a batch for each, or a tuple or dict with a batch of all, which is cut."
            )
        found: Batches = tuple(batch_arguments(one) for one in batch)
    else:
        found = _cut(*batch_arguments(batch), options, function, behind, places)
    _check_alike(found)
    return found


def _cut(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions, function: Callable[..., Any], behind: int,
    places: int,
) -> Batches:  # fmt: skip
    parts = take_call_apart(args, kwargs)
    dims = dims_of_call(options.batch_dims, args, kwargs, function, behind)
    found = [list(parts.leaves) for _ in range(places)]
    for at, leaf in parts.tensors():
        dim = dims[at] if dims is not None else 0 if leaf.ndim else None
        if dim is None:
            continue
        if leaf.shape[dim] < places:
            raise BatchError(
                f"verify(ddp=True): {parts.paths[at]} has {leaf.shape[dim]} samples in dim {dim}, fewer than the "
                f"{places} places of the data axes. Write batch_dims= if another dim counts them (None: no dim does), "
                f"or a list with a batch for each place."
            )
        for place, part in enumerate(leaf.tensor_split(places, dim)):
            found[place][at] = part.contiguous()
    return tuple(put_together(parts.form, leaves) for leaves in found)


def _check_alike(batches: Batches) -> None:
    """Raise BatchError if batches have other structures, Python values or numbers of dims: then ranks refuse them."""
    first, *others = (take_call_apart(*batch) for batch in batches)
    for place, other in enumerate(others, 1):
        if first.form != other.form or _values(first) != _values(other):
            raise BatchError(
                f"verify(ddp=True): the batch of place {place} differs from that of place 0 in more than sizes "
                f"(structure, number of dims, dtype or a Python value). On ranks these are alike, and sizes may differ."
            )


def _values(parts: Parts) -> list[Any]:
    return [(leaf.ndim, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in parts.leaves]


def shapes_of(batch: Arguments) -> tuple[torch.Size, ...]:
    """The shapes of its tensors: batches with the same ones share a program."""
    return tuple(leaf.shape for _, leaf in take_call_apart(*batch).tensors())


def on_meta(batch: Arguments) -> Arguments:
    """The same without data."""
    parts = take_call_apart(*batch)
    leaves = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in parts.leaves]
    return put_together(parts.form, leaves)


def aux_at(key: Key, place: int) -> Key:
    """The name of what comes beside the loss at a place."""
    return key if place == 0 else (key[0], f"{key[1]} of place {place}")


def bound_by(first: Lowered, options: StepOptions, fixed: Fixed) -> tuple[StepOptions, Fixed]:
    """For programs of the same module and other sizes: parameters stay where the first program has them."""
    structure, decided = first.decided
    sequence: SequenceParallel = "auto" if options.sequence_parallel else False
    bound = replace(options, shard=dict(first.searched), sequence_parallel=sequence)
    wanted = True if options.sequence_parallel is True else first.sequence
    owners = None if first.pipeline is None else first.pipeline.owners
    return bound, replace(
        fixed, stored=dict(first.layouts), owners=owners, uneven=True, decided={structure: decided}, sequence=wanted
    )
