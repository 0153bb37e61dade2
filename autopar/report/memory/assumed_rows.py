"""How many rows go to each expert where there is no data: the mean, the worst case of a rank, or those of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import op
from autopar.ir.program import Program, operand_nodes, record
from autopar.runtime.collectives.mesh_ops import axis_coord
from autopar.runtime.collectives.rows_to_owners import bound_of

Table = Sequence[Sequence[int]]
_ROUTES = frozenset(map(op, ("route", "route_start")))
_TRIPS = frozenset(map(op, ("dispatch", "dispatch_start", "combine", "combine_start")))


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What the host reads of a route. mesh: of layouts. worst: all rows of the group come to this rank. counted: by the
    module of the experts, what a route told this rank in a step (`DistributedDriver.routed`)."""

    mesh: Mesh
    coord: Mapping[str, int]
    worst: bool = False
    counted: Mapping[str, Table] = field(default_factory=dict)

    def read(self, node: fx.Node, number: int) -> int | None:
        """What the host reads next of the counts in a call; None for one that reads none. number: how many it has
        read."""
        if node.target is op("owned_index"):
            table = self._table(node, node)
            return sum(map(sum, table[len(table) // 2 :]))
        if node.target not in _TRIPS:
            return None
        table, route = self._table(node, operand_nodes(node)[0]), operand_nodes(node)[-1]
        row, column = divmod(number, record(route).type.shape[1])
        return table[row][column] if column < len(table[row]) else 0

    def copied(self, node: fx.Node | None, shape: Sequence[int]) -> torch.Tensor | None:
        """The counts that a route copies to the host, which end with three numbers of faults; None for any other
        call."""
        source = node.all_input_nodes[0] if node is not None and node.target is op("wait") else node
        if source is None or source.target not in _ROUTES:
            return None
        known = self._table(source, operand_nodes(source)[0])
        return torch.tensor([[*row, *[0] * (shape[1] - len(row))] for row in known])

    def _table(self, node: fx.Node, value: fx.Node) -> Table:
        """The counts as `route` tells them, for a route itself or a call that reads it. value: with the rows of one."""
        route = node if node.target in _ROUTES else operand_nodes(node)[-1]
        axis, counted = str(node.args[1]), self.counted.get(record(route).module)
        if counted is not None:
            return counted
        rows, ranks = local_type(value, self.mesh).shape[0], self.mesh[axis]
        if self.worst:
            place = axis_coord(self.mesh, self.coord, axis)
            return [[rows * (rank == place)] for rank in range(ranks)] + [[rows]] * ranks
        return [[rows // ranks + (rank < rows % ranks)] for rank in range(ranks)] * 2


def routes_rows(program: Program) -> bool:
    """Whether rows go to their experts in a program, in numbers that the data decide."""
    return any(node.target in _ROUTES and not bound_of(node) for node in program.calls())
