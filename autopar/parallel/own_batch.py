"""What ranks with batches of their own have together (batch="ddp"), to the letter of DistributedDataParallel.

Each place of the data axes runs its own step. Of the losses and gradients all take the mean, whatever the numbers of
samples; buffers are those of the first place, as DDP sends them before the next forward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.parallel.agreement import lost_peers
from autopar.parallel.bindings import Bindings
from autopar.parallel.local_batch import World
from autopar.runtime.executor import Outputs
from autopar.runtime.wire import on_wire


def means(outputs: Outputs, bound: Bindings, world: World) -> Outputs:
    """The outputs of a step with the means of all places in them. Every rank must call this."""
    if world.places == 1:
        return outputs
    averaged, buffers = bound.of_all
    found = list(outputs)
    with lost_peers("taking the means of all ranks"):
        for values in _of_one_dtype([found[at] for at in averaged if found[at] is not None]):
            _mean(values, world)
        for at in buffers:
            found[at] = found[at].contiguous()
            for axis in world.axes:
                group = world.device_mesh.get_group(axis)
                dist.broadcast(on_wire(found[at]), src=dist.get_global_rank(group, 0), group=group)
    return tuple(found)


def _of_one_dtype(values: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        kinds.setdefault(value.dtype, []).append(value)
    return list(kinds.values())


def _mean(values: list[torch.Tensor], world: World) -> None:
    """Write the mean over all places into values of one dtype: they move as one."""
    flat = torch.cat([value.reshape(-1) for value in values]) / world.places
    for axis in world.axes:
        dist.all_reduce(
            torch.view_as_real(flat) if flat.is_complex() else flat, group=world.device_mesh.get_group(axis)
        )
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view(value.shape))
