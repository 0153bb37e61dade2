"""The cheapest choice of one strategy per item, exactly: a 0-1 programme solved by HiGHS.

minimise  sum(cost of the chosen strategies) + sum(cost of moving each value to each state that is wanted of it)

Each edge has a variable for every pair (state the source has, state the user wants), tied to both ends' choices;
a value that several users want in one state is moved once (Alpa, arXiv 2201.12023 section 4, with shared moves).

Most choices follow from a few: once the matrix products have theirs, the linear relaxation of the rest is mostly whole
by itself. So only the `deciding` items must be whole at first, then also those that come out in fractions. Each of
these programmes is a relaxation of the full one, so that a whole solution is its optimum.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

OPTIMAL, INFEASIBLE = 0, 2  # what milp says
WHOLE = 1 - 1e-5  # a share above this is 1, within the solver's tolerance


@dataclass(slots=True)
class Problem:
    """Items with strategies, and edges between their ports.

    `costs[i][s]`: the cost of strategy s of item i. An edge joins port states: `source_states[s]` is the state that
    the source's strategy s gives, `user_states[t]` the one that the user's strategy t wants; `move` maps pairs to
    their cost (a pair that is missing is impossible). `deciding`: the items that most others follow.
    """

    costs: list[Sequence[float]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    deciding: frozenset[int] = frozenset()


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
    whole = set(problem.deciding)
    while True:
        solution = model.solve([variable for item in sorted(whole) for variable in chosen[item]])
        if solution is None:
            return None
        shares = [solution[variables] for variables in chosen]
        fractional = {item for item, share in enumerate(shares) if share.max() < WHOLE} - whole
        if not fractional:
            return [int(np.argmax(share)) for share in shares]
        whole |= fractional


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

    def solve(self, integer: list[int]) -> np.ndarray | None:
        shape = (len(self.low), len(self.costs))
        matrix = csr_array((self.values, (self.rows, self.columns)), shape=shape)
        scale = max(max(self.costs, default=1.0), 1e-9) / 1e6
        integrality = np.zeros(len(self.costs))
        integrality[integer] = 1
        result = milp(
            np.array(self.costs) / scale,
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            bounds=Bounds(0, 1),
            integrality=integrality,
            options={"mip_rel_gap": 0.0},  # no time limit: a plan must not depend on the machine
        )
        assert result.status in (OPTIMAL, INFEASIBLE), result.message
        solution: np.ndarray | None = result.x
        return solution
