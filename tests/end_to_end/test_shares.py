"""The share of many cases that `make test` runs: of a cross product all pairs of values, of a dear test its budget."""

from __future__ import annotations

import ast
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from costs import BUDGET, COSTS, Cost, beyond_budget, read_costs, spread, write_costs
from shares import covering, pairs


@pytest.mark.parametrize("sizes", [(4, 3), (2, 2, 2), (4, 2, 4), (2, 5, 2, 4, 2), (3, 1, 3), (3, 3, 3, 3)], ids=str)
def test_any_two_values_of_unlike_kinds_come_together(sizes: tuple[int, ...]) -> None:
    chosen = covering(sizes)
    for (i, size), (j, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(places[i], places[j]) for places in chosen} == set(itertools.product(range(size), range(other)))
    *_, second, first = sorted(sizes)
    assert len(chosen) <= 1.8 * first * second, "of as many the two longest kinds have pairs"


def test_the_others_are_slow_and_none_is_lost() -> None:
    made = list(pairs("abcd", (2, 3), (None, True, False)))
    assert [each.values for each in made] == list(itertools.product("abcd", (2, 3), (None, True, False)))
    quick = [each.values for each in made if not each.marks]
    assert len(quick) == len(covering((4, 2, 3))) < len(made)
    assert {mark.name for each in made for mark in each.marks} == {"slow"}


def test_every_value_comes_before_one_comes_again() -> None:
    cases = {f"{mesh}-{zero}": {"mesh": mesh, "zero": zero} for mesh in range(4) for zero in range(3)}
    chosen = [cases[name] for name in spread(cases, 4)]
    assert {case["mesh"] for case in chosen} == set(range(4)) and {case["zero"] for case in chosen} == set(range(3))
    assert len(spread(cases, 7)) == 7 and sorted(spread(cases, 99)) == sorted(cases)


def test_a_new_case_moves_no_other() -> None:
    cases = {str(seed): {"seed": seed} for seed in range(40)}
    before, after = spread(cases, 9), spread({**cases, "new": {"seed": 40}}, 9)
    assert len(set(before) - set(after)) <= 1


@pytest.mark.parametrize("seconds", [0.2 * BUDGET, BUDGET, 2 * BUDGET, 4 * BUDGET, 99 * BUDGET])
def test_a_dear_test_has_what_its_budget_pays_for(seconds: float, request: pytest.FixtureRequest) -> None:
    items: list[Any] = [each for each in request.session.items if each.function is request.function]
    beyond = beyond_budget(items, {items[0].nodeid.partition("[")[0]: Cost(len(items), seconds)})
    assert len(items) - len(beyond) == min(len(items), max(1, int(BUDGET * len(items) / seconds)))
    assert not beyond_budget(items, {}), "what was never measured runs whole"


def test_costs_are_kept_of_what_the_budget_does_not_pay_for(tmp_path: Path) -> None:
    dear = Cost(4, 3 * BUDGET)
    write_costs({"b::dear": dear, "a::cheap": Cost(9, 0.9 * BUDGET), "a::one": Cost(1, 9 * BUDGET)}, tmp_path / "costs")
    assert read_costs(tmp_path / "costs") == {"b::dear": dear}
    write_costs({"a::one": dear}, tmp_path / "costs")
    assert read_costs(tmp_path / "costs") == {"a::one": dear, "b::dear": dear}, "the other did not run"
    write_costs({"b::dear": Cost(4, 0.5 * BUDGET)}, tmp_path / "costs")
    assert read_costs(tmp_path / "costs") == {"a::one": dear}, "it is dear no more"


def test_costs_are_of_tests_that_are_there() -> None:
    """A test that has another name by now would run whole: give its row in tests/costs.csv the new name,
    or take it out."""
    assert [name for name in read_costs() if name.partition("::")[2] not in _tests_of(name.partition("::")[0])] == []


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((COSTS.parent.parent / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
