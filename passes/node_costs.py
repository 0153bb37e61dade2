"""Estimate the time of a node on one rank, in microseconds of a machine; only ratios count."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from autopar.ir.measure import goes_to_one, local_bytes, moved_type
from autopar.ir.mesh import Mesh, is_in_time
from autopar.ir.ops import collective_of, is_collective, is_mesh_op
from autopar.ir.plan import Machine
from autopar.ir.program import Program, is_getitem, is_view, operand_nodes, record
from autopar.ir.ring_ops import is_ring, messages_of


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
        if is_in_time(str(node.args[1])):  # what one rank adds up, or has, moves nothing
            return 0.0
        return machine.latency_us + _bytes_on_links(node, mesh) / machine.link_bytes_per_us
    if is_ring(node.target):  # the slower of its products and its messages, of which one hides the other
        sent = [(message.times, message.type.bytes_) for message in messages_of(node, mesh)]
        on_link = sum(times * (machine.latency_us + size / machine.link_bytes_per_us) for times, size in sent)
        return max(on_link, _computed(node, mesh, machine, sizes))
    return _computed(node, mesh, machine, sizes)


def _computed(node: fx.Node, mesh: Mesh, machine: Machine, sizes: Mapping[fx.Node, int]) -> float:
    moved = sizes[node] + sum(sizes[operand] for operand in operand_nodes(node))
    flops = record(node).flops
    parts = math.prod(mesh[axis] for axis in _axes(node)) if flops else 1
    return max(machine.call_us, moved / machine.memory_bytes_per_us, flops / parts / machine.flops_per_us)


def _bytes_on_links(node: fx.Node, mesh: Mesh) -> float:
    """What a rank sends in a collective (ring algorithms, as in search/costs.py)."""
    known, size = collective_of(node.target), mesh[str(node.args[1])]
    bytes_ = moved_type(node, mesh).bytes_
    if goes_to_one(node, mesh):
        return bytes_
    rounds = 2 if (known.has, known.gives) == ("sum", None) else 1
    return rounds * bytes_ * (size - 1) / size


def _axes(node: fx.Node) -> set[str]:
    found = record(node)
    layouts = [layout for layout in (*found.layouts, *found.operands) if layout is not None]
    return {axis for layout in layouts for axis in layout.axes}


def by_origin(program: Program, times: Mapping[fx.Node, float]) -> dict[tuple[str, str], float]:
    """The time of the backward pass by module and source line: it belongs to the forward calls of that line."""
    found: dict[tuple[str, str], float] = {}
    for node, time in times.items():
        known = record(node)
        if known.is_backward:
            key = (known.module, known.source)
            found[key] = found.get(key, 0.0) + time
    return found
