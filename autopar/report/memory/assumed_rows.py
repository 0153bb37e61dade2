"""How many rows go to each expert where there is no data: the mean, the worst case of a rank, or those of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import local_type, share_of_tokens
from autopar.ir.ops.ops import op
from autopar.ir.program import Program, operand_nodes, record
from autopar.runtime.collectives.mesh_ops import axis_coord
from autopar.runtime.collectives.rows_to_owners import bound_of

Table = Sequence[Sequence[int]]
_ROUTES = frozenset(map(op, ("route", "route_start")))
_TRIPS = frozenset(op(f"{name}{half}") for name in ("token_places", "dispatch", "combine") for half in ("", "_start"))
_ROUTE, _CHOSEN = 3, 4  # where these take it, and it how many rows of a token follow each other


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
            ranks = self.mesh[str(node.args[1])]
            return sum(map(sum, table[ranks : 2 * ranks]))
        if node.target not in _TRIPS:
            return None
        route = node.args[_ROUTE]
        assert isinstance(route, fx.Node)
        table = self._table(node, operand_nodes(node)[1])
        row, column = divmod(number, record(route).type.shape[1])
        return table[row][column] if column < len(table[row]) else 0

    def copied(self, node: fx.Node | None, shape: Sequence[int]) -> torch.Tensor | None:
        """The counts that a route copies to the host, which begin with tokens, if these are counted, and end with three
        numbers of faults; None for any other call."""
        source = node.all_input_nodes[0] if node is not None and node.target is op("wait") else node
        if source is None or source.target not in _ROUTES:
            return None
        known = self._table(source, operand_nodes(source)[0])
        rows, tokens = known[: shape[0]], known[shape[0] :] or [[]] * shape[0]
        told = [[*of[:1], *row] for of, row in zip(tokens, rows, strict=True)]
        return torch.tensor([[*row, *[0] * (shape[1] - len(row))] for row in told], device="cpu")

    def _table(self, node: fx.Node, value: fx.Node) -> Table:
        """The counts as `route` tells them, for a route itself or a call that reads it. value: of its rows, or of those
        of each token."""
        route = node if node.target in _ROUTES else operand_nodes(node)[2 if node.target in _TRIPS else 1]
        axis, counted = str(node.args[1]), self.counted.get(record(route).module)
        if counted is not None:
            return counted
        shape, ranks = local_type(value, self.mesh).shape, self.mesh[axis]
        place = axis_coord(self.mesh, self.coord, axis)
        chosen = route.args[_CHOSEN] if node is route and len(route.args) > _CHOSEN else math.prod(shape[1:])
        assert isinstance(chosen, int)
        rows, groups, counts = math.prod(shape), record(route).type.shape[1] * ranks, list[list[int]]()
        goes = 1.0 if self.worst else ranks * share_of_tokens(groups, ranks, chosen)
        of_tokens = local_type(route, self.mesh).shape[0] > 2 * ranks
        for one in (rows, *([round(rows // chosen * goes)] if of_tokens else [])):
            if self.worst:
                counts += [*([one * (rank == place)] for rank in range(ranks)), *[[one]] * ranks]
            else:
                counts += [[one // ranks + (rank < one % ranks)] for rank in range(ranks)] * 2
        return counts


def routes_rows(program: Program) -> bool:
    """Whether rows go to their experts in a program, in numbers that the data decide."""
    return any(node.target in _ROUTES and not bound_of(node) for node in program.calls())
