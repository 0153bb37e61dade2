"""Estimate the time of a node on one rank, in microseconds of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from autopar.ir.measure import goes_to_one, group_of, local_bytes, local_types, moved_type
from autopar.ir.mesh import Mesh
from autopar.ir.ops import collective_of, is_collective, is_mesh_op
from autopar.ir.program import Program, is_getitem, is_view, operand_nodes, record
from autopar.ir.ring_ops import CHAIN_IN_TURNS, axis_of, is_ring, messages_of
from autopar.machines import Machine
from autopar.machines.model import FRESH


def node_times(program: Program, machine: Machine) -> dict[fx.Node, float]:
    """The time of every call of a LOCAL program on one micro-batch, in us (roofline: products or memory)."""
    sizes = {node: local_bytes(node, program.mesh) for node in program.graph.nodes}
    return {node: _time(node, program.mesh, machine, sizes) for node in program.calls()}


def _time(node: fx.Node, mesh: Mesh, machine: Machine, sizes: Mapping[fx.Node, int]) -> float:
    if is_getitem(node) or is_view(node):
        return 0.0
    if is_mesh_op(node.target):
        if not is_collective(node.target):
            return 0.0
        return _moved(node, mesh, machine)
    if is_ring(node.target):  # the slower of its products and its messages, of which one hides the other
        sent = [(message.times, message.type.bytes_) for message in messages_of(node, mesh)]
        group = group_of(mesh, axis_of(node), machine.ranks)
        on_link = sum(times * machine.message_us(size, group) for times, size in sent)
        if node.target is CHAIN_IN_TURNS:  # each rank waits for those before it, and those after it for each
            return on_link + mesh[axis_of(node)] * _computed(node, mesh, machine, sizes)
        return max(on_link, _computed(node, mesh, machine, sizes))
    return _computed(node, mesh, machine, sizes)


def _computed(node: fx.Node, mesh: Mesh, machine: Machine, sizes: Mapping[fx.Node, int]) -> float:
    moved = sizes[node] + sum(sizes[operand] for operand in operand_nodes(node))
    flops = record(node).flops
    parts = ranks_of(node, mesh) if flops else 1
    dtype = str(record(operand_nodes(node)[0]).type.dtype).removeprefix("torch.") if flops else ""
    took = machine.call_us(flops / parts, dtype, moved, attention=flops > 0 and "attention" in str(node.target))
    if sizes[node] < FRESH:
        return took
    return took + sum(machine.fresh_us(type_.bytes_) for type_ in local_types(node, mesh))


def _moved(node: fx.Node, mesh: Mesh, machine: Machine) -> float:
    """The time of a collective; what one rank adds up, or has, moves nothing."""
    known, group = collective_of(node.target), group_of(mesh, str(node.args[1]), machine.ranks)
    bytes_ = moved_type(node, mesh).bytes_
    if group.size == 1:
        return 0.0
    if goes_to_one(node, mesh):
        return machine.message_us(bytes_, group)
    whole = bytes_ * (group.size if known.name == "all_to_all" else 1)  # of which each rank has a part before and after
    return machine.collective_us(known.name, whole, group)


def ranks_of(node: fx.Node, mesh: Mesh) -> int:
    """The ranks among which a product is divided."""
    found = record(node)
    layouts = [layout for layout in (*found.layouts, *found.operands) if layout is not None]
    return math.prod(mesh[axis] for axis in {axis for layout in layouts for axis in layout.axes})


def by_origin(program: Program, times: Mapping[fx.Node, float]) -> dict[tuple[str, str], float]:
    """The time of the backward pass by module and source line: it belongs to the forward calls of that line."""
    found: dict[tuple[str, str], float] = {}
    for node, time in times.items():
        known = record(node)
        if known.is_backward:
            key = (known.module, known.source)
            found[key] = found.get(key, 0.0) + time
    return found
