"""The search finds the optimum: small random problems against the enumeration of all choices, larger ones and those of
models against the plain 0-1 programme, in which all strategies are whole from the start."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scipy.optimize import linprog
from unlike import unlike

from autopar.capture import capture
from autopar.ir.mesh import parse_mesh
from autopar.ir.plan import Plan
from autopar.passes.search import solve as solve_module
from autopar.passes.search.axes import AxisSearch, axis_searches, classes_of
from autopar.passes.search.solve import Edge, Problem, solve

STATES = "xyz"


def random_problem(seed: int, items: int = 6, possible: float = 0.8) -> Problem:
    """Some items, values with one to three users, moves of which some are impossible."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(items)]
    problem = Problem([[float(rng.randint(0, 3)) for _ in range(size)] for size in sizes])
    states = [tuple(rng.choice(STATES) for _ in range(size)) for size in sizes]
    for source in range(items - 1):
        prices = {(s, t): 0.0 if s == t else float(rng.randint(1, 9)) for s in STATES for t in STATES}
        for user in rng.sample(range(source + 1, items), min(3, items - 1 - source)):
            wanted = tuple(rng.choice(STATES) for _ in range(sizes[user]))
            move = {pair: cost for pair, cost in prices.items() if pair[0] == pair[1] or rng.random() < possible}
            problem.edges.append(Edge(source, source, states[source], user, wanted, move))
    problem.deciding = frozenset(rng.sample(range(items), rng.randint(0, 3)))
    problem.shared = tuple(rng.sample(range(items), rng.randint(0, 3)))
    return problem


def cost(problem: Problem, chosen: Sequence[int]) -> float | None:
    """What a choice costs: each value is moved once to each state that is wanted of it. None if it is impossible."""
    moves = {}
    for edge in problem.edges:
        pair = edge.source_states[chosen[edge.source]], edge.user_states[chosen[edge.user]]
        if pair not in edge.move:
            return None
        moves[edge.value, *pair] = max(edge.move[pair], moves.get((edge.value, *pair), 0.0))
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


def recurrent_problem(seed: int, steps: int = 8) -> Problem:
    """A weight that every step reads as it lies, and a state that goes from step to step: the relaxation halves it."""
    rng = random.Random(seed)
    problem = Problem([[0.0, 0.0, float(rng.randint(0, 9))], [0.0, 0.0]])
    previous = 1
    for step in range(steps):
        number = len(problem.costs)
        problem.costs.append([float(rng.randint(0, 3)) for _ in range(3)])
        same = {(s, s): 0.0 for s in "xyz"}
        problem.edges.append(Edge("weight", 0, tuple("xyz"), number, tuple("xyz"), same))
        price = {(s, t): 0.0 if s == t else float(rng.randint(1, 9)) for s in STATES for t in STATES}
        given = ("x", "y") if step == 0 else ("y", "z", "x")
        problem.edges.append(Edge(previous, previous, given, number, ("x", "y", "z"), price))
        previous = number
    problem.shared, problem.deciding = (0,), frozenset(range(2, len(problem.costs)))
    return problem


def plainly(problem: Problem) -> float | None:
    """The optimum of the full 0-1 programme: nothing follows from anything, nothing is tried one by one."""
    chosen = solve(replace(problem, deciding=frozenset(range(len(problem.costs))), shared=()))
    return None if chosen is None else cost(problem, chosen)


@pytest.mark.parametrize("seed", range(20))
def test_trying_shared_items_gives_the_plain_optimum(seed: int):
    for problem in (random_problem(seed, 30, 1.0), recurrent_problem(seed)):
        best, chosen = plainly(problem), solve(problem)
        assert (best is None) == (chosen is None)
        if chosen is not None:
            assert cost(problem, chosen) == pytest.approx(best, rel=1e-9)


def searches(name: str, *sizes: int) -> list[tuple[AxisSearch, Problem]]:
    program = capture(*unlike(name, *sizes), {}).program
    plan = Plan(parse_mesh("dp=2,tp=2"))
    found = []
    for search in axis_searches(classes_of(program, plan), plan):
        solution = search.solve()
        found.append((search, search.problem(solution.options, solution.strict)))
        search.take(solution)
    return found


@pytest.mark.parametrize("name, sizes", [("unrolled_gru", (6,)), ("temporal_fusion", (4, 4, 2))])
def test_models_of_unlike_nodes_get_what_highs_finds_alone(name: str, sizes: tuple[int, ...]):
    data, tensor = searches(name, *sizes)
    assert tensor[1].shared
    for _, problem in (data, tensor):
        chosen, alone = solve(problem), solve(replace(problem, shared=()))
        assert chosen is not None and alone is not None
        assert cost(problem, chosen) == pytest.approx(cost(problem, alone), rel=1e-9)


def test_an_unrolled_recurrence_takes_a_few_relaxations(monkeypatch: pytest.MonkeyPatch):
    """However many its steps: HiGHS took 22 s for 20 of them, where a relaxation takes 0.3 s."""
    calls: list[str] = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append("relaxation")
        return linprog(*args, **kwargs)

    def milp(*args: object, **kwargs: object) -> object:
        raise AssertionError("what the shared weights leave open is whole by itself")

    problem = searches("unrolled_gru", 12)[1][1]
    monkeypatch.setattr(solve_module, "linprog", counted)
    monkeypatch.setattr(solve_module, "milp", milp)
    assert solve(problem) is not None
    assert 1 < len(calls) < 8
