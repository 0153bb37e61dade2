"""Between which ranks a step moves data, and what it waits for that at least."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from autopar.ir.mesh import CONTEXT_AXES, SHARDED, Mesh, group_name
from autopar.ir.ops.measure import group_of
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.planning.price.cost import Cost, Linear
from autopar.planning.space.candidates import Candidate

ALONE = RankGroup(1)


@dataclass(frozen=True, slots=True)
class DataGroups:
    """shards: the ranks over which ZeRO splits states; one without it. copies: those that hold the same part, or all
    of it without ZeRO: their gradients are added. all: both."""

    shards: RankGroup
    copies: RankGroup
    all: RankGroup = field(default=ALONE, compare=False)

    @classmethod
    def of(cls, candidate: Candidate, ranks: int) -> DataGroups:
        """ranks: of a node."""
        axes, all_ = candidate.axes, _joined(candidate.axes, ("dp", SHARDED, *CONTEXT_AXES), ranks)
        if not candidate.zero:
            return cls(ALONE, all_, all_)
        if candidate.fsdp > 1:
            return cls(_joined(axes, (SHARDED, *CONTEXT_AXES), ranks), _joined(axes, ("dp",), ranks), all_)
        return cls(all_, ALONE, all_)


@cache
def _joined(axes: tuple[tuple[str, int], ...], names: tuple[str, ...], ranks: int) -> RankGroup:
    """The group of those of some axes that a mesh has."""
    mesh = Mesh(axes)
    named = [axis for axis in names if axis in mesh]
    return group_of(mesh, group_name(named), ranks) if named else ALONE


def least_data_us(candidate: Candidate, whole: Cost, layers: int, machine: Machine) -> tuple[float, float]:
    """What the rank that waits longest waits at least, once a step, and of a pipeline what a rank moves for each
    micro-batch, beside whatever it computes. whole: of a micro-batch on one rank, of as many layers; tp and
    pp divide all of it, and products hide what they can. machine: the larger a collective, the faster."""
    if candidate.data == 1:
        return 0.0, 0.0
    parts, deep, read = candidate.tp * candidate.pp, max(layers, 1), _read(candidate, whole)
    gradients, parameters = whole.gradients(layers) / parts, read(layers) / parts
    groups = DataGroups.of(candidate, machine.ranks)
    summed = machine.collective_us("all_reduce", gradients / groups.shards.size, groups.copies)
    gathered = machine.collective_us("all_gather", parameters, groups.shards)
    scattered = machine.collective_us("reduce_scatter", gradients, groups.shards)
    if candidate.pp > 1 and candidate.zero >= 2:
        return (summed, gathered + scattered) if candidate.gathers_again else (summed + gathered, scattered)
    if not candidate.zero:
        scattered, summed = summed, 0.0
    count, last = candidate.microbatches, scattered / deep  # beside the last one nothing is computed
    if candidate.is_alone:
        summed = _hidden(summed, machine)
    if candidate.gathers_again:
        own, each = deep / candidate.pp, read.each / candidate.tp
        outside = machine.collective_us("all_gather", parameters - own * each, groups.shards)
        gathered = 2 * (own * machine.collective_us("all_gather", each, groups.shards) + outside)  # for each pass
        return _hidden(count * (gathered + scattered), machine) + last + summed, 0.0
    if count == 1:
        gathered = _hidden(gathered, machine)
    if count == 1 or candidate.zero >= 2:
        return gathered + _hidden(count * scattered, machine) + last + summed, 0.0
    return gathered + max(scattered, summed), 0.0  # of what is scattered some may be added while more is


def _read(candidate: Candidate, whole: Cost) -> Linear:
    """Bytes of the parameters as a step reads them: what is gathered, in the dtype that computes."""
    copies, plain = whole.gathered(candidate.zero == 3)
    return Linear(copies.outside + plain.outside, copies.each + plain.each)


def _hidden(moved: float, machine: Machine) -> float:
    """us by which calls end later for collectives of `moved` us beside them, which have a part of the device while they
    are under way (passes/costs/streams.py)."""
    return machine.device.communicating * moved
