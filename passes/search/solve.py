"""The cheapest choice of one strategy per item, exactly: a 0-1 programme solved by HiGHS.

minimise  sum(cost of the chosen strategies) + sum(cost of moving each value to each state that is wanted of it)

Each edge has a variable for every pair (state the source has, state the user wants), tied to both ends' choices;
a value that several users want in one state is moved once (Alpa, arXiv 2201.12023 section 4, with shared moves).

Most choices follow from a few: once the matrix products have theirs, the linear relaxation of the rest is mostly whole
by itself. So only the `deciding` items must be whole at first, then also those that come out in fractions. Each of
these programmes is a relaxation of the full one, so that a whole solution is its optimum.

A weight that many products share (the steps of a recurrent layer) is where that ends: the relaxation splits half of it
by rows and half by columns, each step takes the half that suits it, and cuts close the gap step by step. So the
strategies of such `shared` items are tried one by one, the one with the lowest bound first (Land and Doig 1960); with
one of them given, the relaxation is mostly whole.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

OPTIMAL, INFEASIBLE = 0, 2  # what milp says
WHOLE = 1 - 1e-5  # a share above this is 1, within the solver's tolerance
LARGEST = 1e6  # the largest cost, as HiGHS sees it
EQUAL = 1e-6  # costs that differ by no more are the same: its absolute gap


@dataclass(slots=True)
class Problem:
    """Items with strategies, and edges between their ports.

    `costs[i][s]`: the cost of strategy s of item i. An edge joins port states: `source_states[s]` is the state that
    the source's strategy s gives, `user_states[t]` the one that the user's strategy t wants; `move` maps pairs to
    their cost (a pair that is missing is impossible). `deciding`: the items that most others follow. `shared`: those of
    which a choice binds many others that do not touch, the first most.
    """

    costs: list[Sequence[float]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    deciding: frozenset[int] = frozenset()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A use of a value: `user` reads what `source` makes (indices of items).

    source_states, user_states: by strategy of each, the state that is given or wanted. move: the cost of each pair of
    states; a pair that is missing is impossible. value: edges of one value share their moves.
    """

    value: Hashable
    source: int
    source_states: tuple[Hashable, ...]
    user: int
    user_states: tuple[Hashable, ...]
    move: Mapping[Any, float]


def solve(problem: Problem) -> list[int] | None:
    """The index of the chosen strategy of each item, or None if no choice is possible."""
    model, chosen = _model(problem)
    programme = _Programme(model, chosen, problem.deciding)
    best = _branch(programme, problem.shared) if problem.shared else programme.solve()
    return None if best is None else programme.choice(best)


def _branch(programme: _Programme, shared: tuple[int, ...]) -> _Found | None:
    """The optimum. The node with the lowest bound is relaxed; if that is still the lowest, it is solved, or falls into
    one node for each strategy of a shared item that its relaxation divides."""
    best: _Found | None = None
    order = itertools.count()
    nodes: list[tuple[float, int, frozenset[int], _Found | None]] = [(-np.inf, next(order), frozenset(), None)]
    while nodes:
        bound, _, closed, relaxed = heapq.heappop(nodes)
        if _is_worse(bound, best):
            break
        if relaxed is None:
            relaxed = programme.relax(closed)
            if relaxed is not None:
                heapq.heappush(nodes, (relaxed.cost, next(order), closed, relaxed))
            continue
        divided = programme.divided(relaxed)
        item = next((item for item in shared if item in divided), None)
        if item is not None:
            for variable in sorted(set(programme.chosen[item]) - closed):
                others = closed.union(programme.chosen[item]) - {variable}
                heapq.heappush(nodes, (relaxed.cost + relaxed.reduced[variable], next(order), others, None))
            continue
        found = programme.solve(closed) if divided else relaxed
        if found is not None and not _is_worse(found.cost, best):
            best = found
    return best


def _is_worse(cost: float, best: _Found | None) -> bool:
    return best is not None and cost >= best.cost - EQUAL


def _model(problem: Problem) -> tuple[_Model, list[list[int]]]:
    """The programme, and the variables of each item's strategies."""
    model = _Model()
    chosen = [[model.variable(cost) for cost in costs] for costs in problem.costs]
    for variables in chosen:
        model.equal([(v, 1.0) for v in variables], 1.0)
    shared: dict[tuple[Hashable, Hashable, Hashable], list[int]] = {}
    prices: dict[tuple[Hashable, Hashable, Hashable], float] = {}
    for edge in problem.edges:
        pairs = {
            (s, t): model.variable(0.0)
            for s in dict.fromkeys(edge.source_states)
            for t in dict.fromkeys(edge.user_states)
            if (s, t) in edge.move
        }
        for state in dict.fromkeys(edge.source_states):
            terms = [(chosen[edge.source][i], -1.0) for i, s in enumerate(edge.source_states) if s == state]
            model.equal(terms + [(v, 1.0) for (s, _), v in pairs.items() if s == state], 0.0)
        for state in dict.fromkeys(edge.user_states):
            terms = [(chosen[edge.user][i], -1.0) for i, t in enumerate(edge.user_states) if t == state]
            model.equal(terms + [(v, 1.0) for (_, t), v in pairs.items() if t == state], 0.0)
        for pair, variable in pairs.items():
            if edge.move[pair] > 0:
                shared.setdefault((edge.value, *pair), []).append(variable)
                prices[edge.value, *pair] = max(edge.move[pair], prices.get((edge.value, *pair), 0.0))
    for key, variables in shared.items():
        if len(variables) == 1:
            model.costs[variables[0]] = prices[key]
            continue
        move = model.variable(prices[key])
        for variable in variables:
            model.at_most([(variable, 1.0), (move, -1.0)], 0.0)
    return model, chosen


class _Model:
    def __init__(self) -> None:
        self.costs: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def equal(self, terms: list[tuple[int, float]], value: float) -> None:
        self._row(terms, value, value)

    def at_most(self, terms: list[tuple[int, float]], value: float) -> None:
        self._row(terms, -np.inf, value)

    def _row(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for variable, coefficient in terms:
            self.rows.append(len(self.low))
            self.columns.append(variable)
            self.values.append(coefficient)
        self.low.append(low)
        self.high.append(high)


@dataclass(frozen=True, slots=True)
class _Found:
    """A solution of a programme: the shares of its variables, and the cost as HiGHS sees it. reduced: of a relaxation,
    by how much at least the cost of each variable of share 0 grows if it is taken as a whole."""

    shares: np.ndarray
    cost: float
    reduced: np.ndarray


class _Programme:
    """The 0-1 programme with some of its variables closed."""

    def __init__(self, model: _Model, chosen: list[list[int]], deciding: Collection[int]) -> None:
        self.chosen, self.deciding = chosen, deciding
        shape = (len(model.low), len(model.costs))
        matrix = csr_array((model.values, (model.rows, model.columns)), shape=shape)
        self.constraints = LinearConstraint(matrix, np.array(model.low), np.array(model.high))
        self.costs = np.array(model.costs) / (max(max(model.costs, default=1.0), 1e-9) / LARGEST)

    def relax(self, closed: Collection[int] = ()) -> _Found | None:
        """The linear relaxation."""
        rows, low, high = self.constraints.A, self.constraints.lb, self.constraints.ub
        equal, at_most = np.flatnonzero(low == high), np.flatnonzero(low != high)
        result = linprog(
            self.costs,
            A_eq=rows[equal],
            b_eq=high[equal],
            A_ub=rows[at_most] if at_most.size else None,
            b_ub=high[at_most] if at_most.size else None,
            bounds=np.stack([np.zeros(len(self.costs)), self._highest(closed)], axis=1),
            method="highs-ds",
        )
        assert result.status in (OPTIMAL, INFEASIBLE), result.message
        if result.x is None:
            return None
        return _Found(result.x, float(result.fun), np.maximum(result.lower.marginals, 0.0))

    def solve(self, closed: Collection[int] = ()) -> _Found | None:
        """The optimum: whole in what decides at first, then also in what comes out divided."""
        whole = set(self.deciding)
        while True:
            integrality = np.zeros(len(self.costs))
            integrality[[variable for item in sorted(whole) for variable in self.chosen[item]]] = 1
            found = self._milp(integrality, closed)
            if found is None:
                return None
            divided = self.divided(found) - whole
            if not divided:
                return found
            whole |= divided

    def divided(self, found: _Found) -> set[int]:
        """The items of which a solution takes several strategies in part."""
        return {i for i, variables in enumerate(self.chosen) if found.shares[variables].max() < WHOLE}

    def choice(self, found: _Found) -> list[int]:
        """The strategy of each item in a solution that divides none."""
        return [int(np.argmax(found.shares[variables])) for variables in self.chosen]

    def _milp(self, integrality: np.ndarray, closed: Collection[int]) -> _Found | None:
        result = milp(
            self.costs,
            constraints=self.constraints,
            bounds=Bounds(0, self._highest(closed)),
            integrality=integrality,
            options={"mip_rel_gap": 0.0},  # no time limit: a plan must not depend on the machine
        )
        assert result.status in (OPTIMAL, INFEASIBLE), result.message
        return None if result.x is None else _Found(result.x, float(result.fun), np.zeros(len(self.costs)))

    def _highest(self, closed: Collection[int]) -> np.ndarray:
        highest = np.ones(len(self.costs))
        highest[list(closed)] = 0
        return highest
