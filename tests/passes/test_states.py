"""What axes do to a value, one after the other, and what a layout says of it: each is the inverse of the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from autopar.ir.layout import OWNED, fits, parse_layout
from autopar.ir.mesh import parse_mesh
from autopar.passes.rules.rule import Halo, Rule
from autopar.passes.rules.splits import Choice, choice_at, place
from autopar.passes.rules.states import choices_of, compose, may_split, states_of

MESH = parse_mesh("x=2,y=3,z=2")
OUTERS = (1, 2, 3, 4, 6, -2, -4, OWNED)
SIZES = {"a": 24, "b": 12}
Taken = tuple[tuple[Choice, int], ...]


def _rule(**how: object) -> Rule:
    return Rule(((("a", "b"), ()),), ((("a",), ("b",)),), SIZES, **how)  # type: ignore[arg-type]


def _alone(sizes: dict[str, int] = SIZES, **how: object) -> Rule:
    return Rule(((("a",),), (("b",),)), ((("a",),),), sizes, **how)  # type: ignore[arg-type]


def _taken(rule: Rule, axes: str) -> Iterator[Taken]:
    """All ways in which some axes may split, in this order."""
    for before in _taken(rule, axes[:-1]) if axes else ():
        for name, outer in itertools.product("ab", OUTERS):
            if may_split(rule, (name, outer), MESH[axes[-1]], before):
                yield (*before, ((name, outer), MESH[axes[-1]]))
    if not axes:
        yield ()


@pytest.mark.parametrize("axes", ["xy", "xz", "yz", "xyz"])
def test_choices_are_layouts(axes: str) -> None:
    """Whatever axes choose is a layout that fits, of which each has its state again."""
    rule = _rule()
    for taken in _taken(rule, axes):
        for dims, shape in ((rule.operands[0], (288, 1)), (rule.results[0], (24, 12))):
            states = {axis: place(dims, choice, SIZES) for axis, (choice, _) in zip(axes, taken, strict=True)}
            layout = compose(states, 2, MESH)  # type: ignore[arg-type]
            assert fits(shape, layout, MESH) and parse_layout(str(layout)) == layout, (taken, str(layout))
            assert compose(states_of(layout, MESH), 2, MESH) == layout, (taken, str(layout))


RULES = {
    "free": _rule(), "replicated": _rule(replicated=frozenset("a")), "indexed": _rule(indexed=frozenset("a")),
    "positional": _rule(positional=frozenset("a")), "reversed": _rule(reversed=frozenset("a")),
    "turns": _rule(turns="a"), "scan": _rule(scan=("a", False)), "alone": _alone(),
    "owned": _alone(owned=("a", "b"), indexed=frozenset("b")), "halo": _alone(halos=(Halo("a", 1, 1),)),
    "few alone": _alone({"a": 4, "b": 12}),
    "few rows": _alone({"a": 4, "b": 12}, owned=("a", "b"), indexed=frozenset("b")),
    "few owners": _alone({"a": 24, "b": 6}, owned=("a", "b"), indexed=frozenset("b")),
}  # fmt: skip


COUNTS = {
    "free": [12, 10, 86, 97, 488],
    "replicated": [5, 5, 12, 8, 15],
    "indexed": [6, 6, 22, 18, 47],
    "positional": [12, 10, 86, 97, 488],
    "reversed": [7, 7, 32, 28, 79],
    "turns": [12, 10, 73, 79, 239],
    "scan": [12, 10, 73, 79, 239],
    "alone": [14, 12, 132, 145, 1064],
    "owned": [9, 7, 38, 46, 125],
    "halo": [13, 11, 95, 102, 459],
    "few alone": [10, 6, 46, 74, 280],
    "few rows": [5, 1, 3, 15, 3],
    "few owners": [9, 7, 38, 45, 120],
}


@pytest.mark.parametrize("what", RULES)
def test_how_many_choices_there_are(what: str) -> None:
    """Of one axis of 2, of 3, of two of them, and of all three."""
    assert [sum(1 for _ in _taken(RULES[what], axes)) for axes in ("x", "y", "xy", "xz", "xyz")] == COUNTS[what]


@pytest.mark.parametrize(
    "text",
    ["x:y", "y:x", "2:x", "2:y:x", "x:2:y", "2~x", "y:4~x", "2:x:3:y", "x:y:2:z", "2:z:x", "z:x", "z:2:x:y", "@x:y"],
)
def test_layouts_are_choices(text: str) -> None:
    """Each order of axes and integers, also those that a search never makes; of a dim of one name and of two."""
    layout = parse_layout(f"[{text},-]")
    states = states_of(layout, MESH)
    assert compose(states, 2, MESH) == layout
    for axis, state in states.items():
        assert state is not None and not isinstance(state, str)
        choice = choice_at((("a",), ()), state, {"a": 144})
        assert choices_of((("a",), ()), layout, {"a": 144}, MESH)[axis] == choice == ("a", state[1])
