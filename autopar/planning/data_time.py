"""What a step waits for the data axes: sums of gradients, parameters that are gathered."""

from __future__ import annotations

from autopar.ir.measure import group_of
from autopar.ir.mesh import parse_mesh
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.planning.candidates import Candidate
from autopar.planning.layers import Cost


def data_us(candidate: Candidate, cost: Cost, layers: float, machine: Machine) -> float:
    """What a rank waits for the data axis: sums of gradients once a step, parameters of ZeRO-3 where no product hides
    them."""
    if candidate.dp == 1:
        return 0.0
    group = group_of(parse_mesh(candidate.mesh), "dp", machine.ranks)
    gradients, parameters = cost.gradients(layers), cost.parameters(layers)
    if candidate.zero == 0:
        return machine.collective_us("all_reduce", gradients, group)
    scattered = machine.collective_us("reduce_scatter", gradients, group)
    if candidate.zero == 1:
        return scattered + machine.collective_us("all_gather", parameters, group)
    if candidate.zero == 2:
        return _all(candidate, cost, layers, scattered, machine) + machine.collective_us(
            "all_gather", parameters, group
        )
    gathered = _per_layer("all_gather", cost.parameters.each, layers, group, machine)
    hidden = candidate.microbatches * (cost.forward(layers) + cost.backward(layers))
    moved = candidate.microbatches * 2 * gathered
    return _longer(moved, hidden, machine) + _all(candidate, cost, layers, scattered, machine)


def _longer(moved: float, hidden: float, machine: Machine) -> float:
    """us by which calls of `hidden` us end later for collectives of `moved` us beside them, which have a part of the
    device while they are under way (passes/streams.py)."""
    return max(machine.device.communicating * moved, moved - hidden)


def _all(candidate: Candidate, cost: Cost, layers: float, scattered: float, machine: Machine) -> float:
    """Gradients that each micro-batch scatters, under its backward pass; the last bucket has nothing over it."""
    longer = _longer(scattered, cost.backward(layers), machine)
    return candidate.microbatches * longer + scattered / max(layers, 1)


def _per_layer(kind: str, bytes_: float, layers: float, group: Group, machine: Machine) -> float:
    return max(layers, 1) * machine.collective_us(kind, bytes_, group)
