"""Lower bounds from parts of a programme, by the prices that a relaxation of all of it gives to the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.search.solver.problem import nearest
from autopar.passes.search.solver.programme import Programme, ProgrammeSolution

CUT = -1  # the part of a row whose variables lie in several parts
NONE = np.array([], dtype=int)


@dataclass(frozen=True, slots=True)
class ProgrammePart:
    """Some items of a programme as one of their own.

    columns: the variables of the whole that it holds. cost: what it costs in the solution of the whole.
    """

    programme: Programme
    columns: np.ndarray
    cost: float

    def relax(self, closed: Collection[int]) -> ProgrammeSolution | None:
        """The optimum of its relaxation; `closed` are variables of the whole."""
        return self.programme.relax(self._inside(closed))

    def solve(self, closed: Collection[int]) -> ProgrammeSolution | None:
        """Its optimum; `closed` are variables of the whole."""
        return self.programme.solve(self._inside(closed))

    def _inside(self, closed: Collection[int]) -> list[int]:
        return np.flatnonzero(np.isin(self.columns, list(closed))).tolist()


def parts_of(
    whole: Programme,
    owner: np.ndarray,
    neighbours: Sequence[Sequence[int]],
    found: ProgrammeSolution | None,
    seeds: Sequence[Collection[int]],
) -> list[ProgrammePart]:
    """Cut a programme into the items nearest to each of some seeds.

    A row whose variables lie in several parts is dropped and charged for at its price in `found` (Lagrange). What is
    left falls apart, and the optima of the parts add up to at most that of the whole (Geoffrion 1974). With the
    variables closed that were closed in `found`, they add up to its cost. Without `found` nothing has a price.
    """
    if found is None:
        found = ProgrammeSolution(np.zeros(len(whole.costs)), 0.0, 0.0, np.zeros(len(whole.low)))
    nearest_ = np.array(nearest(neighbours, seeds))
    of_variable = nearest_[owner]
    entries = whole.matrix.tocoo()
    first, last = np.full(len(whole.low), len(seeds)), np.full(len(whole.low), CUT)
    np.minimum.at(first, entries.row, of_variable[entries.col])
    np.maximum.at(last, entries.row, of_variable[entries.col])
    of_row = np.where(first == last, first, CUT)
    return [_part(whole, found, k, nearest_, of_variable, of_row) for k in range(len(seeds))]


def _part(
    whole: Programme,
    solution: ProgrammeSolution,
    k: int,
    of_item: np.ndarray,
    of_variable: np.ndarray,
    of_row: np.ndarray,
) -> ProgrammePart:
    rows, columns = np.flatnonzero(of_row == k), np.flatnonzero(of_variable == k)
    number = np.full(len(whole.costs), -1)
    number[columns] = np.arange(len(columns))
    costs = (whole.costs - whole.matrix.T @ np.where(of_row == k, 0.0, solution.prices))[columns]
    chosen = [number[own] if part == k else NONE for own, part in zip(whole.chosen, of_item, strict=True)]
    deciding = frozenset(item for item in whole.deciding if of_item[item] == k)
    matrix = whole.matrix[rows][:, columns]
    programme = Programme(matrix, whole.low[rows], whole.high[rows], costs, chosen, deciding)
    return ProgrammePart(programme, columns, float(costs @ solution.shares[columns]))
