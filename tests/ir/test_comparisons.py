"""Conditions on a query and a key: against their truth tables, by brute force; what is no condition is refused."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from autopar.errors import PlanError
from autopar.ir.comparisons import (
    FALSE,
    SIGNS,
    TRUE,
    All,
    BoolVector,
    Comparison,
    Condition,
    Some,
    every,
    holds,
    names_in,
    opposite,
    parse_condition,
    renamed,
    some,
)  # fmt: skip

SEED = 7
ROWS = {"r0": torch.tensor([0, 1, 2, 3])[:, None], "r1": torch.tensor([True, False, False, True])[:, None]}
COLUMNS = {"c0": torch.tensor([3, 0, 1, 2, 2]), "c1": torch.tensor([True, True, False, False, True])}
VALUES = {**ROWS, **COLUMNS}
SHAPE = torch.Size((4, 5))


def drawn(draw: random.Random, depth: int = 3) -> Condition:
    kind = draw.randrange(6) if depth else draw.randrange(2)
    if kind == 0:
        return Comparison("c0", draw.choice(list(SIGNS)), "r0")
    if kind == 1:
        return BoolVector(draw.choice(["r1", "c1"]), draw.random() < 0.5)
    if kind == 2:
        return draw.choice([TRUE, FALSE])
    join = every if kind < 5 else some
    return join(*(drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))))


def table(condition: Condition) -> torch.Tensor:
    """Where a condition holds, element by element, in plain Python."""

    def at(one: Condition, i: int, j: int) -> bool:
        match one:
            case Comparison(column, sign, row):
                return bool(SIGNS[sign](int(VALUES[column][j]), int(VALUES[row][i, 0])))
            case BoolVector(name, is_true):
                return bool(VALUES[name][i, 0] if name[0] == "r" else VALUES[name][j]) == is_true
            case All(parts):
                return all(at(part, i, j) for part in parts)
            case Some(parts):
                return any(at(part, i, j) for part in parts)

    return torch.tensor([[at(condition, i, j) for j in range(SHAPE[1])] for i in range(SHAPE[0])])


def shown(condition: Condition) -> torch.Tensor:
    found = holds(condition, VALUES)
    return torch.ones(SHAPE, dtype=torch.bool) if found is None else found.expand(SHAPE)


def test_random_conditions_hold_where_their_truth_tables_say() -> None:
    """Joined, turned round, renamed, written and read again: the same table each time."""
    print(f"seed {SEED}")
    draw, swapped = random.Random(SEED), {"r0": "r7", "r1": "r8", "c0": "c9", "c1": "c10"}
    for _ in range(150):
        one, other = drawn(draw), drawn(draw)
        want, beside = table(one), table(other)
        assert torch.equal(shown(one), want), one
        assert torch.equal(shown(every(one, other)), want & beside), (one, other)
        assert torch.equal(shown(some(one, other)), want | beside), (one, other)
        assert torch.equal(shown(opposite(one)), ~want), one
        assert opposite(opposite(one)) == one
        if FALSE not in (one, opposite(one)):  # false has no spelling
            assert parse_condition(str(one)) == one
        moved = renamed(one, swapped)
        assert names_in(moved) == tuple(swapped[name] for name in names_in(one))
        assert renamed(moved, {new: old for old, new in swapped.items()}) == one


def test_what_says_nothing_is_left_out() -> None:
    a, b, c = BoolVector("r1"), BoolVector("c1"), Comparison("c0", "<=", "r0")
    assert every() == every(TRUE, TRUE) == TRUE and some() == some(FALSE) == FALSE
    assert every(a) == some(a) == every(a, a) == some(a, a, FALSE) == every(TRUE, a) == a
    assert every(a, every(b, c)) == All((a, b, c)) and some(some(a, b), c, a) == Some((a, b, c))
    assert every(a, FALSE) == FALSE and some(a, TRUE) == TRUE
    for one in (a, c):
        assert every(b, one, opposite(one)) == FALSE and some(b, one, opposite(one)) == TRUE
    assert every(some(a, b), opposite(a)) == All((Some((a, b)), opposite(a)))
    assert names_in(every(c, b, c, some(a, b))) == ("c0", "r0", "c1", "r1")


def test_what_is_seen_everywhere_has_no_mask() -> None:
    assert holds(TRUE, VALUES) is None and holds(All((TRUE, TRUE)), VALUES) is None
    assert holds(Some((BoolVector("r1"), TRUE)), VALUES) is None
    nowhere = holds(FALSE, VALUES)
    assert nowhere is not None and not nowhere.any()


@pytest.mark.parametrize("sign", SIGNS)
def test_signs_and_spaces(sign: str) -> None:
    read = parse_condition(f" c0 {sign}  r0&( ~c1|r1 ) ")
    want = every(Comparison("c0", sign, "r0"), some(BoolVector("c1", False), BoolVector("r1")))
    assert read == want and str(read) == f"c0{sign}r0 & (~c1 | r1)"
    assert parse_condition("c1 | r1 & c2") == some(BoolVector("c1"), every(BoolVector("r1"), BoolVector("c2")))


REFUSED = {
    "c0<=r0 +": "+", "x0": "x0", "": "its end", "  ": "its end", "c0 &": "its end", "c0 | ": "its end", "~": "its end",
    "~true": "true", "(c0": "its end", "c0)": "its end", "(c0))": "its end", "c0 r0": "r0", "r0<=c0": "<= c0",
    "c0<=c1": "<= c1", "c0<=": "<=", "~c0<=r0": "<= r0", "c0<=~r0": "<= ~ r0", "c0<=r0<=r1": "<= r1",
    "& c0": "& c0", "c0 & | r0": "| r0",
    "true true": "true", "(c0) r0": "r0", "c0<=r0)": "its end",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_condition(text)
    assert f"condition '{text}': cannot read '" in str(caught.value)
    said = re.sub(r".*cannot read '(.*)'; write it like 'c0<=r0 & ~c1'\.", r"\1", str(caught.value))
    assert said.strip() == REFUSED[text]


def test_every_pair_of_signs_and_values() -> None:
    for sign, (a, b) in itertools.product(SIGNS, itertools.product(range(3), repeat=2)):
        values = {"c0": torch.tensor(a), "r0": torch.tensor(b)}
        condition = Comparison("c0", sign, "r0")
        found, turned = holds(condition, values), holds(opposite(condition), values)
        assert found is not None and turned is not None
        assert bool(found) is SIGNS[sign](a, b) and bool(turned) is not bool(found)
