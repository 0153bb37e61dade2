"""The batches that `verify` trains on: the global one, or with `ddp` one for each place of the data axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, LossFn
from autopar.capture.data.reads import Answers
from autopar.capture.inputs.batch_dims import dims_of_call
from autopar.capture.inputs.containers import Parts, put_together, take_call_apart
from autopar.compiler.compile import batch_arguments
from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError
from autopar.ir.mesh import DATA_AXES, PIPELINE, Mesh
from autopar.ir.options import SequenceParallel, StepOptions
from autopar.ir.plan import Fixed
from autopar.parallel.batches.local_batch import place_of
from autopar.parallel.programs.own_batch import AveragedOutputs, seed_of
from autopar.parallel.session.auto_options import check_own
from autopar.report.memory.within_memory import compile_step
from autopar.runtime.executor.executor import Outputs
from autopar.verification.judge.comparison import Key

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # of the loss function, behind the model
Batches = tuple[Arguments, ...]  # by place; a global batch is of one
Made = tuple[Captured, Lowered]  # a program, and what it was captured from


def places_of(mesh: Mesh) -> list[int]:
    """The place of each rank among those that have batches of their own."""
    return [place_of(mesh, coord) for coord in mesh.coords()]


def batches_of(
    batch: Any, mesh: Mesh, options: StepOptions, model: nn.Module, loss_fn: LossFn | None, is_own: bool
) -> Batches:
    """The batch of each place: of a list the place's own, of all else the place's share of samples, as even as can be.

    Raises BatchError for a list of another length, for fewer samples than places, and for batches that differ in more
    than sizes.
    """
    if not is_own:
        return whole_batch(batch)
    function, behind = (model.forward, 0) if loss_fn is None else (loss_fn, 1)
    check_own("ddp", mesh, options)
    places = max(places_of(mesh)) + 1
    if isinstance(batch, list):
        if len(batch) != places:
            raise BatchError(
                f"verify(ddp=True): the list has {len(batch)} batches, but mesh '{mesh}' has {places} places on its "
                f"data axes. Write a batch for each, or a tuple or dict with a batch of all, which is cut."
            )
        cut: Batches = tuple(batch_arguments(one) for one in batch)
    else:
        cut = _cut(*batch_arguments(batch), options, function, behind, places)
    _check_alike(cut)
    return cut


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


def meshes_of_place(mesh: Mesh) -> tuple[Mesh, Mesh]:
    """The ranks of one place, and those of one stage of it."""
    held = tuple((axis, 1 if axis in DATA_AXES else size) for axis, size in mesh.axes)
    return Mesh(held), Mesh(tuple(axis for axis in held if axis[0] != PIPELINE))


def seeds_of(seed: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The seed of each place."""
    return [seed_of(seed, place) for place in range(count)]


def with_means(outputs: Sequence[Outputs], compiled: Lowered, by_rank: Sequence[int]) -> list[Outputs]:
    """The outputs of every rank with what all places have together in them: see `own_batch.py`."""
    together, places = AveragedOutputs.of(compiled.program.outputs), max(by_rank) + 1
    groups: dict[tuple[int, ...], list[int]] = {}  # the ranks that differ in their places alone
    for rank, coord in enumerate(compiled.mesh.coords()):
        groups.setdefault(tuple(at for axis, at in coord.items() if axis not in DATA_AXES), []).append(rank)
    found = [list(one) for one in outputs]
    for ranks in groups.values():
        shares = [together.shares(outputs[rank], places) for rank in ranks]
        sums = [torch.stack(every).sum(0) for every in zip(*shares, strict=True)]
        for rank in ranks:
            together.write(outputs[rank], sums)
            for at in together.written:
                found[rank][at] = outputs[ranks[0]][at]
    return [tuple(one) for one in found]


def shapes_of(batch: Arguments) -> tuple[torch.Size, ...]:
    """The shapes of its tensors: batches with the same ones share a program."""
    return tuple(leaf.shape for _, leaf in take_call_apart(*batch).tensors())


def on_meta(batch: Arguments) -> Arguments:
    """Put a batch on the meta device: shapes without data."""
    parts = take_call_apart(*batch)
    leaves = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in parts.leaves]
    return put_together(parts.form, leaves)


def aux_at(key: Key, place: int) -> Key:
    """The name of what comes beside the loss at a place."""
    return key if place == 0 else (key[0], f"{key[1]} of place {place}")


def whole_batch(batch: Any) -> Batches:
    """A global batch, as that of one place."""
    return (batch_arguments(batch),)


def programs_of(
    model: nn.Module, loss_fn: LossFn | None, batches: Batches, mesh: Mesh, options: StepOptions,
    lift: torch.dtype | None, fixed: Fixed, answers: Answers | None = None,
) -> list[Made]:  # fmt: skip
    """The program of each place; batches of the same shapes share one. The first one decides the layouts. fixed:
    what is decided already. answers: what is known of the step."""
    fixed, answers = replace(fixed, is_own=len(batches) > 1), replace(answers or Answers(), asks=len(batches) == 1)
    found: dict[tuple[torch.Size, ...], Made] = {}
    for batch in batches:
        if shapes_of(batch) not in found:
            made = compile_step(model, loss_fn, *batch, mesh, options, lift=lift, fixed=fixed, answers=answers)
            found[shapes_of(batch)] = made
            options, fixed = _bound_by(made[1], options, fixed)
    return [found[shapes_of(batch)] for batch in batches]


def _bound_by(first: Lowered, options: StepOptions, fixed: Fixed) -> tuple[StepOptions, Fixed]:
    """For programs of the same module and other sizes: parameters stay where the first program has them."""
    structure, decided = first.decided
    sequence: SequenceParallel = "auto" if options.sequence_parallel else False
    bound = replace(options, shard=dict(first.searched), sequence_parallel=sequence)
    wanted = True if options.sequence_parallel is True else first.sequence
    owners = None if first.pipeline is None else first.pipeline.owners
    return bound, replace(
        fixed, stored=dict(first.layouts), owners=owners, uneven=True, decided={structure: decided}, sequence=wanted
    )
