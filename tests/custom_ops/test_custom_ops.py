"""Rules of users' ops are checked when they are registered: right ones are taken, wrong ones refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from custom_op_kernels import RIGHT
from refusals import refused

from autopar.custom_ops.registry import CustomOps, register_rule
from autopar.errors import RuleError, WrongRule


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_taken(name: str) -> None:
    pattern, options, gradients = RIGHT[name]
    registry = CustomOps()
    before = torch.random.get_rng_state()
    made = register_rule(f"own_tests::{name}", pattern, **options, registry=registry)
    assert made.gradients is gradients
    assert str(made).endswith("results and gradients checked" if gradients else "(it has no autograd formula) checked")
    assert registry.names() == {f"own_tests.{name}.default"}
    assert torch.equal(torch.random.get_rng_state(), before)


def without(name: str, key: str) -> dict[str, Any]:
    return {option: value for option, value in RIGHT[name][1].items() if option != key}


VALUES = r"-?[\d.e-]+ from the pieces, -?[\d.e-]+ from the whole"
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("normalised", "b h -> b h", {},
     rf"'h' is not splittable: 'h' \(size \d+\) in 2 pieces: result 0 at \[0, 0\]: {VALUES}"),
    ("lookup", "v h, n -> n h", without("lookup", "replicated"), rf"'v' is not splittable: .*{VALUES}"),
    ("reversed_heads", "b (n d) -> b (n d)", without("reversed_heads", "replicated"),
     rf"'d' is not splittable: .*{VALUES}"),
    ("averaged", "b h, h -> b h", {}, rf"'b' is not splittable: .*: the gradient of operand 0 at \[0, 0\]: {VALUES}"),
    ("halves", "b h -> h, h", {}, rf"'b' is not splittable: .*result 1 at \[0\]: {VALUES}"),
    ("halves", "b h -> h, h", {"partial": "max"}, rf"'b' is not splittable: .*result 0 at \[0\]: {VALUES}"),
    ("scale", "b h, h -> b h", {"linear": [("x", "w")]},
     r"it is not linear in 'x', 'w': result 0 at \[0, 0\]: \S+ is f\(a\) \+ f\(b\), \S+ is f\(a \+ b\)"),
    ("biased", "... h, h -> ... h", {"linear": "x"}, "it is not linear in 'x'"),
    ("biased", ["..., - -> ...", "... h, h -> ... h"], {"linear": ["x"]}, "it is not linear in 'x'"),
    ("mixed", "b, -, b -> b", {"linear": [("x", "y")]}, "it is not linear in 'x', 'y'"),
    ("lookup", "v h, n -> n h", {**RIGHT["lookup"][1], "linear": "index"},
     "it is not linear in 'index': an operand that is no float has no partial sums"),
    ("largest", "b h -> b k", {"replicated": "k", "args": {"k": 5}},
     "'h' is not splittable: .*it raised RuntimeError: selected index k"),
    ("project", "b i, o i -> b o", {"sizes": {"i": 7}}, "'i' is not checked: its size 7 can be cut in neither 2 nor 3"),
    ("project", "b i, o i -> b o", {"sizes": {"o": 1}}, "'o' is not checked: its size 1 can be cut in neither 2 nor 3"),
    ("normalised", "b ... -> b ...", {}, r"'\.\.\.' is not splittable: 'b0'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pattern", "options", "message"), WRONG)
def test_wrong_rules_are_refused_for_the_right_name(
    name: str, pattern: Any, options: dict[str, Any], message: str
) -> None:
    registry = CustomOps()
    with pytest.raises(WrongRule, match=message) as found:
        register_rule(f"own_tests::{name}", pattern, **options, registry=registry)
    text = str(found.value)
    assert text.startswith(f"the rule of own_tests::{name}, ")
    assert not registry.rules, "a wrong rule must not be in use"
    bad = re.findall(r"^  '([\w.]+)' is not splittable", text, re.MULTILINE)
    assert len(bad) <= 1, text
    if bad:
        marks = tuple(sorted({*_several(options.get("replicated", ())), *bad}))
        assert text.endswith(f"If the pattern is right, these must stay replicated: replicated={marks}.")


def _several(items: Any) -> tuple[str, ...]:
    return (items,) if isinstance(items, str) else tuple(items)


def test_the_two_values_are_those_of_the_op() -> None:
    """Ones: each is a quarter of a whole row, and a half of a piece of one."""
    values = "0.5 from the pieces, 0.25 from the whole"
    options: dict[str, Any] = {"sizes": {"b": 2, "h": 4}, "args": {"x": torch.ones}}
    expected = (
        'the rule of own_tests::normalised, "b h -> b h", does not hold:\n'
        f"  'h' is not splittable: 'h' (size 4) in 2 pieces: result 0 at [0, 0]: {values}\n"
        "If the pattern is right, these must stay replicated: replicated=('h',)."
    )
    refused(WrongRule, expected, lambda: rule("normalised", "b h -> b h", **options))


def rule(name: str, pattern: Any, **options: Any) -> object:
    return register_rule(name if "::" in name else f"own_tests::{name}", pattern, **options, registry=CustomOps())


def test_the_same_rule_again_is_fine_and_another_one_is_not() -> None:
    registry = CustomOps()
    texts = "b h, h -> b h", "b h,h->b h"
    again = [register_rule("own_tests::scale", text, linear="x", registry=registry) for text in texts]
    assert again[0] is again[1]
    expected = (
        "own_tests::scale has another rule already: \"b h, h -> b h\", linear=[['x']]; "
        "now \"b h, h -> b h\", replicated=['h']. An op has one rule in a process."
    )
    refused(
        RuleError,
        expected,
        lambda: register_rule("own_tests::scale", "b h, h -> b h", replicated="h", registry=registry),
    )
    assert registry.rules["own_tests.scale.default"] is again[0]


def test_every_pattern_is_checked_by_itself() -> None:
    """The second is hidden behind the first wherever that fits; it is checked all the same."""
    options = RIGHT["largest"][1]
    with pytest.raises(
        WrongRule, match=r'the rule of own_tests::largest, "h b -> h k", does not hold:\n  .b. is not spl'
    ):
        register_rule("own_tests::largest", ["b h -> b k", "h b -> h k"], **options, registry=CustomOps())
