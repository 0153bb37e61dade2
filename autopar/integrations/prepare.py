"""Make the objects of a training loop parallel together, in the shape that Accelerate's loops have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from autopar.api import Options, parallelize
from autopar.capture.inputs import tables
from autopar.checkpoint.generators import generators, set_generators
from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError, BatchError


def prepare(model: nn.Module, *others: Any, mesh: MeshLike, **options: Unpack[Options]) -> Any:
    """Make a training loop parallel: the model, and what goes with it, in the order given.

        model, optimizer, loader, scheduler = autopar.prepare(
            model, optimizer, loader, scheduler, mesh="dp=2,tp=2",
            loss_fn=lambda model, x, y: F.cross_entropy(model(x), y),
        )
        for x, y in loader:
            loss = model.training_loss(x, y)    # was: loss = F.cross_entropy(model(x), y)
            loss.backward()
            ...                                 # clipping, optimizer, scheduler, accumulation: as on one device

    Call it on every rank, under torchrun or alone. The model becomes that of `autopar.parallelize`, which takes mesh
    and options. An optimizer goes on with the parallel parameters, a scheduler with its optimizer: both stay what
    they are. A `DataLoader` gives its batches, the whole ones, alike on every rank: shuffling and augmentation draw
    what rank 0 draws. So nothing is gathered for metrics: `model(x)` is whole on every rank, too. With batch="local"
    or "ddp" each rank's loader is left as it is.

    Raises what `parallelize` does, AutoparError for an optimizer of other parameters, and BatchError for a loader that
    gives each rank other rows of a batch that is said to be whole.
    """
    is_whole = options.get("batch", "global") == "global"
    _check(model, others, is_whole)
    parallel = parallelize(model, mesh, **options)
    return (parallel, *(SameBatches(each) if is_whole and _is_loader(each) else each for each in others))


class SameBatches:
    """A `DataLoader` whose random numbers are those of rank 0 on every rank, from each of its passes on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(vars(loader))  # of which Fabric makes a loader of its own
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if dist.is_initialized() and dist.get_world_size() > 1:
            own = _own_generators(self.loader)
            said = [(generators(), [each.get_state() for each in own]) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(said, src=0)
            assert said[0] is not None
            set_generators({name: state for name, state in said[0][0].items() if name != "cuda"})
            for each, state in zip(own, said[0][1], strict=True):
                each.set_state(state)
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy, which has nothing yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def _own_generators(loader: DataLoader[Any]) -> list[Any]:
    """The generators that a loader draws from beside the default ones."""
    sampler = getattr(loader, "sampler", None)
    found = [getattr(loader, "generator", None), getattr(sampler, "generator", None)]
    return list({id(each): each for each in found if each is not None}.values())


def _is_loader(value: Any) -> bool:
    return isinstance(value, DataLoader)


def _check(model: nn.Module, others: tuple[Any, ...], is_whole: bool) -> None:
    """Raise what is wrong with the arguments, before anything changes."""
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"prepare(model, ...) takes the model first, then optimizer, loader, scheduler in any order; the first "
            f"argument is of type {type(model).__name__}."
        )
    known = {id(parameter) for parameter in tables.parameters(model)}
    for at, each in enumerate(others, 1):
        if isinstance(each, nn.Module):
            raise AutoparError(
                f"prepare() makes one model parallel, and argument {at} is a second one ({type(each).__name__}): call "
                f"prepare for each model that is trained, with its own loss_fn. One that is only called in the loss "
                f"needs nothing (docs/several_models.md)."
            )
        if isinstance(each, Optimizer):
            given = [p for group in each.param_groups for p in group["params"]]
            if not any(id(parameter) in known for parameter in given):
                raise AutoparError(
                    f"prepare(): the {type(each).__name__} of argument {at} has {len(given)} parameters, none of which "
                    f"is of the {type(model).__name__}: make it of model.parameters()."
                )
        if is_whole and _is_loader(each) and isinstance(getattr(each, "sampler", None), DistributedSampler):
            raise BatchError(
                f"prepare(): the loader of argument {at} has a DistributedSampler, which gives each rank other rows, "
                f"but the batch is the whole one on every rank. Leave the sampler out and give the loader the batch "
                f'size of all ranks together, or say batch="local" (docs/local_batches.md).'
            )
