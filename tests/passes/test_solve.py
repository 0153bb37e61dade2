"""The search finds the optimum: small random problems against the enumeration of all choices."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.passes.search.solve import Edge, Problem, solve

STATES = "xyz"


def random_problem(seed: int) -> Problem:
    """Some items, values with one to three users, moves of which some are impossible."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(6)]
    problem = Problem([[float(rng.randint(0, 3)) for _ in range(size)] for size in sizes])
    states = [tuple(rng.choice(STATES) for _ in range(size)) for size in sizes]
    for source in range(5):
        prices = {(s, t): 0.0 if s == t else float(rng.randint(1, 9)) for s in STATES for t in STATES}
        for user in rng.sample(range(source + 1, 6), min(3, 5 - source)):
            wanted = tuple(rng.choice(STATES) for _ in range(sizes[user]))
            move = {pair: cost for pair, cost in prices.items() if pair[0] == pair[1] or rng.random() < 0.8}
            problem.edges.append(Edge(source, source, states[source], user, wanted, move))
    problem.deciding = frozenset(rng.sample(range(6), rng.randint(0, 3)))
    return problem


def cost(problem: Problem, chosen: tuple[int, ...]) -> float | None:
    """What a choice costs: each value is moved once to each state that is wanted of it. None if it is impossible."""
    moves = {}
    for edge in problem.edges:
        pair = edge.source_states[chosen[edge.source]], edge.user_states[chosen[edge.user]]
        if pair not in edge.move:
            return None
        moves[edge.value, *pair] = edge.move[pair]
    return sum(moves.values()) + sum(costs[i] for costs, i in zip(problem.costs, chosen, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_solve_finds_the_cheapest_choice(seed: int):
    problem = random_problem(seed)
    every = (cost(problem, chosen) for chosen in itertools.product(*(range(len(c)) for c in problem.costs)))
    possible = [found for found in every if found is not None]
    chosen = solve(problem)
    if not possible:
        assert chosen is None
        return
    assert chosen is not None
    assert cost(problem, tuple(chosen)) == pytest.approx(min(possible))
    assert solve(problem) == chosen
