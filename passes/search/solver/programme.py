"""The choice of one strategy per item as a 0-1 programme, and its linear relaxation.

minimise  sum(cost of the chosen strategies) + sum(cost of moving each value to each state that is wanted of it)

A value of which x_s is the share that has state s, of which a user wants the share w_t in state t, and of which m_st is
moved from s to t, has for each user

    w_t <= sum(x_s, free from s to t) + sum(m_st)    what is wanted is there, or is moved there
    x_s <= sum(w_t, free from s to t) + sum(m_st)    what is there is wanted, or is moved away
    m_st <= x_s                                      only what is there is moved

A value that several users want in one state is moved once (Alpa, arXiv 2201.12023 section 4, with shared moves). Alpa
has a variable for each pair of states of each edge; these rows give the same bounds on our models with half as many.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.passes.search.solver.problem import Edge, Problem

if TYPE_CHECKING:  # scipy takes half a second to load, and a program that is read from a cache needs no search
    from scipy.sparse import csr_array

OPTIMAL, INFEASIBLE = 0, 2  # what scipy says
WHOLE = 1 - 1e-5  # a share above this is 1, within the solver's tolerance
LARGEST = 1e6  # the largest cost, as HiGHS sees it
# Variables that are to be whole in one programme. HiGHS has limits of time and of nodes alone, and works for half a
# minute on the first node of some that have more. They are then decided some at a time, PIECE variables each.
MOST, PIECE = 300, 100
# A programme of more variables is narrowed before it is solved, as HiGHS works for many seconds on the first node of
# some. So many relaxations may be tried for a first plan; an item follows them where they take more than SURE of one
# strategy. Plans whose costs differ by no more than SAME are equal (of costs up to LARGEST).
LARGE, DIVES, SURE, SAME = 2_000, 20, 0.7, 1.0


@dataclass(frozen=True, slots=True)
class ProgrammeSolution:
    """A solution of a programme: the shares of its variables, and the cost as HiGHS sees it. bound: none costs less.
    prices: of a relaxation, what the cost would grow by for each unit on the right of a row.

    A cost of infinity: none was found, though there may be some that cost `bound` or more."""

    shares: np.ndarray
    cost: float
    bound: float
    prices: np.ndarray


@dataclass(frozen=True, slots=True)
class Programme:
    """A 0-1 programme, or a part of one: minimise the costs of variables under low <= matrix @ variables <= high.

    chosen: by item, the variables of its strategies; none of an item that lies outside. deciding: the items that most
    others follow. Each method takes the variables that are `closed`.
    """

    matrix: csr_array
    low: np.ndarray
    high: np.ndarray
    costs: np.ndarray
    chosen: list[np.ndarray]
    deciding: frozenset[int]

    def relax(self, closed: Collection[int] = ()) -> ProgrammeSolution | None:
        """The optimum of the linear relaxation."""
        equal, at_most = np.flatnonzero(self.low == self.high), np.flatnonzero(self.low != self.high)
        from scipy.optimize import linprog

        result = linprog(
            self.costs,
            A_eq=self.matrix[equal] if equal.size else None,
            b_eq=self.high[equal] if equal.size else None,
            A_ub=self.matrix[at_most] if at_most.size else None,
            b_ub=self.high[at_most] if at_most.size else None,
            bounds=np.stack([np.zeros(len(self.costs)), self._highest(closed)], axis=1),
            method="highs-ds",
        )
        assert result.status in (OPTIMAL, INFEASIBLE), result.message
        if result.x is None:
            return None
        prices = np.zeros(len(self.low))
        prices[equal], prices[at_most] = result.eqlin.marginals, result.ineqlin.marginals
        return ProgrammeSolution(result.x, float(result.fun), float(result.fun), prices)

    def solve(self, closed: Collection[int] = ()) -> ProgrammeSolution | None:
        """The optimum: whole in what decides at first, then also in what comes out divided.

        Once that would be more than MOST variables, what was whole stays as it came out, and the plan may cost more
        than its `bound`."""
        whole, least = set(self.deciding), None
        closed = self._narrowed(closed) if len(self.costs) > LARGE else closed
        solution = self._milp(whole, closed)
        while solution is not None and (divided := sorted(self.divided(solution) - whole)):
            most = MOST if least is None else PIECE
            if whole and self._size({*whole, *divided}) > most:
                least = least or solution
                kept = (self.chosen[item] for item in whole)
                closed = {
                    *closed,
                    *(variable for own in kept for variable in own[solution.shares[own] < WHOLE].tolist()),
                }
                whole = set()
            else:
                sizes = itertools.accumulate(len(self.chosen[item]) for item in divided)
                fitting = [item for item, size in zip(divided, sizes, strict=True) if size <= most]
                whole.update(fitting or divided[:1])
            solution = self._milp(whole, closed)
        if least is None:
            return solution
        return replace(solution, bound=least.cost) if solution else replace(least, cost=np.inf)

    def _narrowed(self, closed: Collection[int]) -> Collection[int]:
        """Close each strategy and move with which a plan is dearer than one that is known: by its reduced cost, the
        relaxation would grow beyond that plan (Dantzig, Fulkerson and Johnson 1954). Of a move a plan has all or
        nothing, too."""
        relaxed = self.relax(closed)
        plan = relaxed and self._dived(relaxed, closed)
        if not relaxed or not plan:
            return closed
        reduced = self.costs - self.matrix.T @ relaxed.prices
        return {*closed, *np.flatnonzero(reduced > plan.cost - relaxed.cost + SAME).tolist()}

    def _dived(self, relaxed: ProgrammeSolution, closed: Collection[int]) -> ProgrammeSolution | None:
        """Find a plan near a relaxation, or None: what it divides takes what it prefers, the deciding items first, and
        of them the surest."""
        solution: ProgrammeSolution | None = relaxed
        for _ in range(DIVES):
            divided = self.divided(solution) if solution else set()
            if not solution or not divided:
                return solution
            first = sorted(divided & self.deciding or divided)
            most = {item: solution.shares[self.chosen[item]].max() for item in first}
            for item in [item for item in most if most[item] > SURE] or [max(most, key=most.__getitem__)]:
                preferred = self.preferred(item, solution)
                closed = {*closed, *(variable for variable in self.chosen[item].tolist() if variable != preferred)}
            solution = self.relax(closed)
        return None

    def _size(self, items: Collection[int]) -> int:
        """The number of their variables."""
        return sum(len(self.chosen[item]) for item in items)

    def divided(self, solution: ProgrammeSolution) -> set[int]:
        """The items of which a solution takes several strategies in part."""
        return {i for i, own in enumerate(self.chosen) if len(own) and solution.shares[own].max() < WHOLE}

    def misfits(self, shares: np.ndarray) -> np.ndarray:
        """The variables of the rows that shares break."""
        sums = self.matrix @ shares
        broken = (sums < self.low - (1 - WHOLE)) | (sums > self.high + (1 - WHOLE))
        return np.unique(self.matrix[np.flatnonzero(broken)].indices)

    def preferred(self, item: int, solution: ProgrammeSolution) -> int:
        """The variable of the strategy of which a solution takes most; of equal ones the first."""
        own = self.chosen[item]
        return int(own[np.argmax(solution.shares[own].round(6))])  # whatever the last digits

    def choice(self, solution: ProgrammeSolution) -> list[int]:
        """The strategy of each item in a solution that divides none."""
        return [int(np.argmax(solution.shares[variables])) for variables in self.chosen]

    def _milp(self, whole: Collection[int], closed: Collection[int]) -> ProgrammeSolution | None:
        """The optimum among those that divide none of the items in `whole`."""
        integrality = np.zeros(len(self.costs))
        for item in whole:
            integrality[self.chosen[item]] = 1
        from scipy.optimize import Bounds, LinearConstraint, milp

        result = milp(
            self.costs,
            constraints=LinearConstraint(self.matrix, self.low, self.high),
            bounds=Bounds(0, self._highest(closed)),
            integrality=integrality,
            options={"mip_rel_gap": 0.0},  # no time limit: a plan must not depend on the machine
        )
        assert result.status in (OPTIMAL, INFEASIBLE), result.message
        if result.x is None:
            return None
        return ProgrammeSolution(result.x, float(result.fun), float(result.fun), np.zeros(len(self.low)))

    def _highest(self, closed: Collection[int]) -> np.ndarray:
        highest = np.ones(len(self.costs))
        highest[list(closed)] = 0
        return highest


def programme_of(problem: Problem) -> tuple[Programme, np.ndarray]:
    """The programme of a problem, and the item that each variable belongs to: a move is its source's."""
    rows = _Rows(problem)
    shape = (len(rows.low), len(rows.costs))
    from scipy.sparse import csr_array

    matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=shape)
    costs = np.array(rows.costs) / (max(max(rows.costs, default=1.0), 1e-9) / LARGEST)
    chosen = [np.array(variables) for variables in rows.chosen]
    programme = Programme(matrix, np.array(rows.low), np.array(rows.high), costs, chosen, problem.deciding)
    return programme, np.array(rows.owner)


class _Rows:
    """The variables and rows of a problem's programme."""

    def __init__(self, problem: Problem) -> None:
        self.costs: list[float] = []
        self.owner: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.chosen = [[self._variable(i, cost) for cost in costs] for i, costs in enumerate(problem.costs)]
        for variables in self.chosen:
            self._row(variables, [1.0] * len(variables), 1.0, 1.0)
        values: dict[Hashable, list[Edge]] = {}
        for edge in problem.edges:
            values.setdefault(edge.value, []).append(edge)
        for edges in values.values():
            self._value(edges)

    def _variable(self, owner: int, cost: float) -> int:
        self.costs.append(cost)
        self.owner.append(owner)
        return len(self.costs) - 1

    def _row(self, variables: list[int], coefficients: list[float], low: float, high: float) -> None:
        self.rows += [len(self.low)] * len(variables)
        self.columns += variables
        self.values += coefficients
        self.low.append(low)
        self.high.append(high)

    def _at_most(self, less: list[int], more: list[int]) -> None:
        self._row([*less, *more], [1.0] * len(less) + [-1.0] * len(more), -np.inf, 0.0)

    def _shares(self, item: int, states: tuple[Hashable, ...]) -> dict[Hashable, list[int]]:
        """By state, the strategies that have it."""
        shares: dict[Hashable, list[int]] = {}
        for variable, state in zip(self.chosen[item], states, strict=True):
            shares.setdefault(state, []).append(variable)
        return shares

    def _value(self, edges: list[Edge]) -> None:
        """The moves of a value, and the rows of each of its users."""
        given = self._shares(edges[0].source, edges[0].source_states)
        users = [self._shares(edge.user, edge.user_states) for edge in edges]
        prices: dict[tuple[Hashable, Hashable], float] = {}
        for edge, wanted in zip(edges, users, strict=True):
            for pair in ((s, t) for s in given for t in wanted if edge.move.get((s, t), 0.0) > 0):
                prices[pair] = max(edge.move[pair], prices.get(pair, 0.0))
        moves = {pair: self._variable(edges[0].source, price) for pair, price in prices.items()}
        self._moved(given, moves, len(edges) == 1)
        for edge, wanted in zip(edges, users, strict=True):
            self._use(edge, given, wanted, moves)

    def _moved(self, given: dict[Hashable, list[int]], moves: dict[tuple[Hashable, Hashable], int], once: bool) -> None:
        """Only what is there is moved; to one state alone, if there is one user."""
        for state, strategies in given.items():
            found = [move for (s, _), move in moves.items() if s == state]
            for group in [found] if once and found else [[move] for move in found]:
                self._at_most(group, strategies)

    def _use(
        self,
        edge: Edge,
        given: dict[Hashable, list[int]],
        wanted: dict[Hashable, list[int]],
        moves: dict[tuple[Hashable, Hashable], int],
    ) -> None:
        """What is wanted is there or is moved there; what is there is wanted or is moved away."""

        def ways(s: Hashable, t: Hashable, free: list[int]) -> list[int]:
            cost = edge.move.get((s, t))
            return [] if cost is None else [moves[s, t]] if cost > 0 else free

        for t, strategies in wanted.items():
            self._at_most(strategies, [v for s, shares in given.items() for v in ways(s, t, shares)])
        for s, strategies in given.items():
            self._at_most(strategies, [v for t, shares in wanted.items() for v in ways(s, t, shares)])
