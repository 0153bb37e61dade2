"""What a step without a pipeline waits for the data axes: sums of gradients, parameters that are gathered. And what
any step waits at least; of a pipeline `data_streams.py` says more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from autopar.ir.measure import group_of
from autopar.ir.mesh import CONTEXT_AXES, SHARDED, Mesh, group_name
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.planning.candidates import Candidate
from autopar.planning.cost import Cost, Linear
from autopar.planning.deal import Share

ALONE = Group(1)


@dataclass(frozen=True, slots=True)
class DataGroups:
    """shards: the ranks over which ZeRO splits states; one without it. copies: those that hold the same part, or all
    of it without ZeRO: their gradients are added."""

    shards: Group
    copies: Group

    @classmethod
    def of(cls, candidate: Candidate, ranks: int) -> DataGroups:
        """ranks: of a node."""
        axes = candidate.axes
        if not candidate.zero:
            return cls(ALONE, _joined(axes, ("dp", *CONTEXT_AXES), ranks))
        if candidate.fsdp > 1:
            return cls(_joined(axes, (SHARDED, *CONTEXT_AXES), ranks), _joined(axes, ("dp",), ranks))
        return cls(_joined(axes, ("dp", *CONTEXT_AXES), ranks), ALONE)


@cache
def _joined(axes: tuple[tuple[str, int], ...], names: tuple[str, ...], ranks: int) -> Group:
    """The group of those of some axes that a mesh has."""
    mesh = Mesh(axes)
    named = [axis for axis in names if axis in mesh]
    return group_of(mesh, group_name(named), ranks) if named else ALONE


@dataclass(frozen=True, slots=True)
class Moved:
    """What a rank moves over the data axes, and what it computes meanwhile. gradients, parameters: bytes, of these as
    the step reads them. each: bytes of the parameters of a layer, of `layers`. last: the part of the gradients that
    nothing is computed beside. forward, backward: us of a micro-batch."""

    gradients: float
    parameters: float
    each: float
    layers: float
    last: float
    forward: float
    backward: float


def data_us(candidate: Candidate, cost: Cost, share: Share, machine: Machine) -> float:
    """What a rank waits for the data axes: sums of gradients once a step, parameters of ZeRO-3 where no product hides
    them. cost: of the rank, which has this share of the model."""
    if candidate.data == 1:
        return 0.0
    layers, busy = share.stored.layers, share.time.layers
    deep, read = max(layers, 1.0), _read(candidate, cost)
    moved = Moved(
        cost.gradients(layers), read(layers), read.each, deep, 1 / deep, cost.forward(busy), cost.backward(busy)
    )
    return _waits(candidate, moved, machine)


def least_data_us(candidate: Candidate, whole: Cost, layers: int, machine: Machine) -> tuple[float, float]:
    """What the rank that waits longest waits at least, once a step, and of a pipeline what a rank moves for each
    micro-batch, beside whatever it computes. whole: of a micro-batch on one rank, of as many layers; tp and
    pp divide all of it, and products hide what they can. machine: the larger a collective, the faster."""
    if candidate.data == 1:
        return 0.0, 0.0
    parts, deep, read = candidate.tp * candidate.pp, max(layers, 1), _read(candidate, whole)
    gradients, parameters = whole.gradients(layers) / parts, read(layers) / parts
    if candidate.pp > 1 and candidate.zero >= 2:
        return _least_of_pipeline(candidate, gradients, parameters, machine)
    moved = Moved(
        gradients, parameters, read.each / candidate.tp, deep / candidate.pp, 1 / deep, math.inf, math.inf
    )  # fmt: skip
    return _waits(candidate, moved, machine), 0.0


def _least_of_pipeline(
    candidate: Candidate, gradients: float, parameters: float, machine: Machine
) -> tuple[float, float]:
    """As `least_data_us`, with ZeRO-2 or ZeRO-3."""
    groups = DataGroups.of(candidate, machine.ranks)
    summed = machine.collective_us("all_reduce", gradients / groups.shards.size, groups.copies)
    gathered = machine.collective_us("all_gather", parameters, groups.shards)
    scattered = machine.collective_us("reduce_scatter", gradients, groups.shards)
    return (summed, gathered + scattered) if candidate.gathers_again else (summed + gathered, scattered)


def _read(candidate: Candidate, whole: Cost) -> Linear:
    """Bytes of the parameters as a step reads them: what is gathered, in the dtype that computes."""
    copies, plain = whole.gathered(candidate.zero == 3)
    return Linear(copies.outside + plain.outside, copies.each + plain.each)


def _waits(candidate: Candidate, moved: Moved, machine: Machine) -> float:
    """A gradient is scattered over the ranks that split states, and their parts are added over those that hold the same
    one, at the end. With one micro-batch, and from ZeRO-2 on, it leaves under the backward pass."""
    groups, count = DataGroups.of(candidate, machine.ranks), candidate.microbatches

    def us(kind: str, bytes_: float, group: Group = groups.shards) -> float:
        return machine.collective_us(kind, bytes_, group)

    scattered = us("reduce_scatter", moved.gradients)
    summed = us("all_reduce", moved.gradients / groups.shards.size, groups.copies)
    if not candidate.zero:
        scattered, summed = summed, 0.0
    last = moved.last * scattered
    if candidate.gathers_again:
        outside = us("all_gather", moved.parameters - moved.layers * moved.each)
        gathered = 2 * (moved.layers * us("all_gather", moved.each) + outside)  # for each pass
        hidden = count * (moved.forward + moved.backward)
        return _longer(count * (gathered + scattered), hidden, last, machine) + summed
    gathered = us("all_gather", moved.parameters)
    if count == 1:
        gathered = _longer(gathered, moved.forward, 0.0, machine)
    if count == 1 or candidate.zero >= 2:
        scattered = _longer(count * scattered, count * moved.backward, last, machine)
    return scattered + summed + gathered


def _longer(moved: float, hidden: float, last: float, machine: Machine) -> float:
    """us by which calls of `hidden` us end later for collectives of `moved` us beside them, which have a part of the
    device while they are under way (passes/streams.py). last: us of the last one, beside which nothing is computed."""
    return max(machine.device.communicating * moved + last, moved - hidden)
