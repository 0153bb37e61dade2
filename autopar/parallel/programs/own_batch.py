"""What ranks with batches of their own have together (batch="ddp"), to the letter of DistributedDataParallel.

Each place of the data axes runs its own step. Of the losses and gradients all take the mean, whatever the numbers of
samples; buffers, and parameters that a step writes, are those of the first place, as DDP sends them before the next
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.ir.program import BUFFERS, Output
from autopar.parallel.agree.agreement import lost_peers
from autopar.parallel.batches.local_batch import BatchWorld
from autopar.runtime.executor.executor import Outputs
from autopar.runtime.ranks.wire import on_wire

_APART = 1 << 32  # between the seeds of ranks that draw numbers of their own


@dataclass(frozen=True, slots=True)
class AveragedOutputs:
    """Which outputs of a program, by their places, are means over all ranks (the loss and gradients), and which are
    written: new buffers and new weights."""

    averaged: tuple[int, ...]
    written: tuple[int, ...]

    @staticmethod
    def of(outputs: Sequence[Output]) -> AveragedOutputs:
        averaged = tuple(at for at, out in enumerate(outputs) if out.kind in ("loss", "gradient"))
        written = tuple(at for at, out in enumerate(outputs) if out.kind in (*BUFFERS, "weight"))
        return AveragedOutputs(averaged, written)

    def shares(self, outputs: Outputs, places: int) -> list[torch.Tensor]:
        """What each place adds to the means: a tensor for each dtype, so that values move as one."""
        return [torch.cat([outputs[at].reshape(-1) for at in ats]) / places for ats in self._by_dtype(outputs)]

    def write(self, outputs: Outputs, sums: Sequence[torch.Tensor]) -> None:
        """Write the sums of the shares of all places into the outputs of one."""
        for ats, total in zip(self._by_dtype(outputs), sums, strict=True):
            for at, mean in zip(ats, total.split([outputs[at].numel() for at in ats]), strict=True):
                outputs[at].copy_(mean.view(outputs[at].shape))

    def _by_dtype(self, outputs: Outputs) -> list[list[int]]:
        kinds: dict[torch.dtype, list[int]] = {}
        for at in self.averaged:
            if outputs[at] is not None:
                kinds.setdefault(outputs[at].dtype, []).append(at)
        return list(kinds.values())


def means(outputs: Outputs, together: AveragedOutputs, world: BatchWorld) -> Outputs:
    """The outputs of a step with the means of all places in them. Every rank must call this."""
    if world.places == 1:
        return outputs
    with lost_peers("taking the means of all ranks"):
        sums = together.shares(outputs, world.places)
        for flat in sums:
            for axis in world.axes:
                dist.all_reduce(on_wire(flat), group=world.device_mesh.get_group(axis))
        together.write(outputs, sums)
        means = list(outputs)
        for at in together.written:
            means[at] = means[at].contiguous()
            for axis in world.axes:
                group = world.device_mesh.get_group(axis)
                dist.broadcast(on_wire(means[at]), src=dist.get_global_rank(group, 0), group=group)
    return tuple(means)


def of_all_places(counts: torch.Tensor, world: BatchWorld) -> torch.Tensor:
    """The sum of what each place counts in its batch. Every rank must call this."""
    total = counts.clone()
    with lost_peers("adding up the rows of all ranks"):
        for axis in world.axes:
            dist.all_reduce(on_wire(total), group=world.device_mesh.get_group(axis))
    return total


def seed_of(drawn: torch.Tensor, place: int) -> torch.Tensor:
    """The seed of a place, which draws numbers of its own."""
    return drawn + drawn.new_tensor([place, 0]) * _APART
