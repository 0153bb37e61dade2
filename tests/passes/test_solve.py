"""The search finds the optimum: small random problems against the enumeration of all choices, larger ones against a
plain 0-1 programme, those of models against the search that knows no shared weights; and in few relaxations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from plain_search import cost, least_cost
from unlike import unlike

from autopar.capture import capture
from autopar.ir.mesh import parse_mesh
from autopar.ir.plan import Plan
from autopar.passes.search.axes import AxisSearch, axis_searches, classes_of
from autopar.passes.search.solver import programme
from autopar.passes.search.solver import solve as search
from autopar.passes.search.solver.parts import parts_of
from autopar.passes.search.solver.problem import Edge, Problem
from autopar.passes.search.solver.programme import Programme, ProgrammeSolution, programme_of
from autopar.passes.search.solver.solve import solve

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
    problem.shared = tuple(rng.sample(range(items), rng.randint(0, 4)))
    return problem


@pytest.mark.parametrize("seed", range(80))
def test_solve_finds_the_cheapest_choice(seed: int):
    problem = random_problem(seed)
    every = (cost(problem, chosen) for chosen in itertools.product(*(range(len(c)) for c in problem.costs)))
    possible = [found for found in every if found is not None]
    choice = solve(problem)
    if not possible:
        assert choice is None
        return
    assert choice is not None and choice.above == 0
    assert cost(problem, choice.strategies) == pytest.approx(min(possible))
    assert solve(problem) == choice


def recurrent_problem(seed: int, weights: int = 1, steps: int = 8) -> Problem:
    """Weights that every step reads as they lie, by turns, and a state that goes from step to step: the relaxation
    halves them."""
    rng = random.Random(seed)
    problem = Problem([[0.0, 0.0, float(rng.randint(0, 9))] for _ in range(weights)] + [[0.0, 0.0]])
    previous = weights
    for step in range(steps):
        number = len(problem.costs)
        problem.costs.append([float(rng.randint(0, 3)) for _ in range(3)])
        same = {(s, s): 0.0 for s in "xyz"}
        weight = rng.randrange(weights) if seed % 2 else step * weights // steps
        problem.edges.append(Edge(f"weight {weight}", weight, tuple("xyz"), number, tuple("xyz"), same))
        price = {(s, t): 0.0 if s == t else float(rng.randint(1, 9)) for s in STATES for t in STATES}
        given = ("x", "y") if step == 0 else ("y", "z", "x")
        problem.edges.append(Edge(("state", previous), previous, given, number, ("x", "y", "z"), price))
        previous = number
    problem.shared, problem.deciding = tuple(range(weights)), frozenset(range(weights + 1, len(problem.costs)))
    return problem


def scaled(problem: Problem, by: float) -> Problem:
    """The problem with all costs so many times larger."""
    edges = [replace(edge, move={pair: by * us for pair, us in edge.move.items()}) for edge in problem.edges]
    return replace(problem, costs=[[by * us for us in own] for own in problem.costs], edges=edges)


@pytest.mark.parametrize("by", [1e-4, 1 / 3])
@pytest.mark.parametrize("seed", range(8, 12))
def test_the_unit_of_costs_does_not_matter(seed: int, by: float):
    """The unit of costs decides neither the plan nor, but for what rounding does, how often is looked. Red with
    `EQUAL = 0` in solve.py: a bound that rounding left below the best plan is opened once more."""
    problem = recurrent_problem(seed, weights=2)
    choice, whole = solve(scaled(problem, by)), solve(problem)
    assert choice is not None and whole is not None
    assert cost(problem, choice.strategies) == pytest.approx(cost(problem, whole.strategies))
    assert choice.above == 0
    assert choice.visited <= whole.visited


@pytest.mark.parametrize("seed", range(14))
def test_shared_items_get_the_optimum_of_the_plain_programme(seed: int):
    for problem in (random_problem(seed, 20, 1.0), *(recurrent_problem(seed, weights, 12) for weights in (1, 2, 4))):
        best, choice = least_cost(problem), solve(problem)
        assert (best is None) == (choice is None)
        if choice is not None:
            assert cost(problem, choice.strategies) == pytest.approx(best, rel=1e-9) and choice.above == 0


@pytest.mark.parametrize("seed", range(16))
def test_a_large_programme_is_narrowed_to_what_holds_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Red with `SAME = -300_000`: what is a little cheaper than the known plan is closed too."""
    monkeypatch.setattr(programme, "LARGE", 0)
    for problem in (random_problem(seed, 14, 0.9), *(recurrent_problem(seed, weights, 12) for weights in (1, 3))):
        best, choice, whole = least_cost(problem), solve(problem), programme_of(problem)[0]
        found = whole.solve()
        assert (best is None) == (choice is None) == (found is None)
        if best is not None and choice is not None and found is not None:
            assert cost(problem, choice.strategies) == pytest.approx(best, rel=1e-9) and choice.above == 0
            assert cost(problem, whole.choice(found)) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_part_never_promises_more_than_the_whole_costs(seed: int):
    """Take a strategy for each of some items; whatever other strategies these get, no plan is cheaper than the parts
    say."""
    problem = recurrent_problem(seed, 3, 9)
    whole, owner = programme_of(problem)
    taken = {item: int(whole.chosen[item][seed % 3]) for item in problem.shared}
    others = {item: set(whole.chosen[item].tolist()) - {taken[item]} for item in taken}
    found = whole.relax(set().union(*others.values()))
    assert found is not None
    parts = parts_of(whole, owner, problem.neighbours(), found, [[item] for item in taken])
    for changed in itertools.product([False, True], repeat=len(taken)):
        bound, closed = found.cost, set[int]()
        for change, part, item in zip(changed, parts, taken, strict=True):
            own = {taken[item]} if change else others[item]
            best = part.relax(own)
            assert best is not None
            bound += best.cost - part.cost
            closed |= own
            assert change or best.cost == pytest.approx(part.cost, abs=1e-3), "the price of what is taken"
        optimum = whole.solve(closed)
        assert optimum is None or bound <= optimum.cost + 1e-3


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_is_cut_short_says_how_far_it_may_be_from_the_cheapest(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """It ends after a few nodes and small programmes, with a plan that is possible, the same each time."""
    problem = recurrent_problem(seed, 3, 12)
    best = least_cost(problem)
    assert best is not None
    monkeypatch.setattr(programme, "MOST", 6)
    monkeypatch.setattr(programme, "PIECE", 3)
    size = len(programme_of(problem)[0].costs)
    for nodes in (1, 4):
        monkeypatch.setattr(search, "ENOUGH", (nodes - 1) * size)
        choice = solve(problem)
        assert choice is not None and choice.visited <= 2 * nodes and choice == solve(problem)
        found = cost(problem, choice.strategies)
        assert found is not None and best <= found + 1e-6 and found * (1 - choice.above) <= best + 1e-3


def searches(name: str, *sizes: int) -> list[tuple[AxisSearch, Problem]]:
    program = capture(*unlike(name, *sizes), {}).program
    plan = Plan(parse_mesh("dp=2,tp=2"))
    found = []
    for axis in axis_searches(classes_of(program, plan), plan):
        solution = axis.solve()
        found.append((axis, axis.problem(solution.options, solution.strict)))
        axis.take(solution)
    return found


@pytest.mark.parametrize(
    "name, sizes", [("unrolled_gru", (6,)), ("temporal_fusion", (4, 4, 2)), ("dual_path", (1, 4, 4))]
)
def test_models_of_unlike_nodes_get_what_highs_finds_alone(name: str, sizes: tuple[int, ...]):
    data, tensor = searches(name, *sizes)
    assert tensor[1].shared
    for _, problem in (data, tensor):
        choice, alone = solve(problem), programme_of(problem)[0].solve()
        assert choice is not None and alone is not None
        best = cost(problem, programme_of(problem)[0].choice(alone))
        assert cost(problem, choice.strategies) == pytest.approx(best, rel=1e-9) and choice.above == 0


@pytest.mark.parametrize(
    "name, sizes, relaxations, programmes",
    [("unrolled_gru", (12,), 3, 0), ("dual_path", (2, 8, 6), 1, 0), ("temporal_fusion", (8, 12, 6), 1, 1)],
)
def test_recurrent_models_take_a_few_relaxations(
    name: str, sizes: tuple[int, ...], relaxations: int, programmes: int, monkeypatch: pytest.MonkeyPatch
):
    """However many their steps and weights. HiGHS alone took 22 s for 20 steps of the first; weight by weight, the
    second took 9 relaxations. A relaxation of the whole takes 0.3 s, a part of it a fraction."""
    problem = searches(name, *sizes)[1][1]
    size = len(programme_of(problem)[0].costs)
    calls = []
    for method in ("relax", "solve"):
        original = getattr(Programme, method)

        def counted(
            self: Programme, closed: Collection[int] = (), original: object = original, method: str = method
        ) -> ProgrammeSolution | None:
            calls.append(method if len(self.costs) == size else "part")
            return original(self, closed)  # type: ignore[operator]

        monkeypatch.setattr(Programme, method, counted)
    monkeypatch.setattr(programme, "LARGE", size)  # what narrows a programme is not counted
    assert solve(problem) is not None
    assert calls.count("relax") <= relaxations
    assert calls.count("solve") <= programmes


def test_what_is_known_of_a_problem_is_told_of_no_other() -> None:
    """Two programs share an answer where all that decides it is the same, whatever their values are called."""
    problem, again = random_problem(5), random_problem(5)
    again.edges = [replace(edge, value=("renamed", edge.value)) for edge in again.edges]
    assert problem.content() == again.content()
    first, *others = again.edges
    (pair, cost), *_ = first.move.items()
    changes = {
        "costs": [[1.5, *costs[1:]] for costs in again.costs],
        "edges": [replace(first, move={**first.move, pair: cost + 1}), *others],
        "deciding": again.deciding ^ {0},
        "shared": (*again.shared, 99),
    }
    for name, value in changes.items():
        assert replace(again, **{name: value}).content() != problem.content(), name
    together = [replace(edge, value=0) for edge in again.edges]
    assert replace(again, edges=together).content() != problem.content(), "moves are shared by the users of one value"
