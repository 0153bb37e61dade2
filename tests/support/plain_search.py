"""The choice of strategies as one plain 0-1 programme: what the search must find, written another way.

A variable for every strategy and for every pair of states of every edge, all whole (Alpa, arXiv 2201.12023, section 4).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from autopar.passes.search.solver.problem import Problem

INFEASIBLE = 2  # what milp says


def cost(problem: Problem, chosen: Sequence[int]) -> float | None:
    """What a choice costs: each value is moved once to each state that is wanted of it. None if it is impossible."""
    moves = {}
    for edge in problem.edges:
        pair = edge.source_states[chosen[edge.source]], edge.user_states[chosen[edge.user]]
        if pair not in edge.move:
            return None
        moves[edge.value, *pair] = max(edge.move[pair], moves.get((edge.value, *pair), 0.0))
    return sum(moves.values()) + sum(costs[i] for costs, i in zip(problem.costs, chosen, strict=True))


def least_cost(problem: Problem) -> float | None:
    """The cost of the optimum, or None if no choice is possible."""
    costs: list[float] = []
    rows: list[tuple[dict[int, float], float, float]] = []

    def variable(price: float) -> int:
        costs.append(price)
        return len(costs) - 1

    chosen = [[variable(price) for price in prices] for prices in problem.costs]
    rows += [(dict.fromkeys(own, 1.0), 1.0, 1.0) for own in chosen]
    prices: dict[tuple[Hashable, ...], float] = {}
    for edge in problem.edges:
        for pair, price in edge.move.items():
            prices[edge.value, *pair] = max(price, prices.get((edge.value, *pair), 0.0))
    moves = {key: variable(price) for key, price in prices.items()}
    for edge in problem.edges:
        pairs = {(s, t): variable(0.0) for s, t in edge.move if s in edge.source_states and t in edge.user_states}
        for side, item, states in ((0, edge.source, edge.source_states), (1, edge.user, edge.user_states)):
            for state in set(states):
                row = {chosen[item][i]: -1.0 for i, own in enumerate(states) if own == state}
                rows.append((row | {v: 1.0 for pair, v in pairs.items() if pair[side] == state}, 0.0, 0.0))
        priced = [(moves[edge.value, *pair], v) for pair, v in pairs.items() if edge.move[pair] > 0]
        rows += [({v: 1.0, move: -1.0}, -np.inf, 0.0) for move, v in priced]
    matrix = np.zeros((len(rows), len(costs)))
    for i, (row, _, _) in enumerate(rows):
        matrix[i, list(row)] = list(row.values())
    limits = LinearConstraint(matrix, np.array([low for _, low, _ in rows]), np.array([high for _, _, high in rows]))
    found = milp(np.array(costs), constraints=limits, bounds=Bounds(0, 1), integrality=np.ones(len(costs)))
    assert found.status in (0, INFEASIBLE), found.message
    return None if found.x is None else float(found.fun)
