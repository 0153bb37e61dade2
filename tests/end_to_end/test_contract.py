"""docs/contract.md: every promise names a test, every test that it names exists, and the README leads there."""

from __future__ import annotations

import ast
import re
from functools import cache

from conftest import ROOT

CONTRACT = (ROOT / "docs" / "contract.md").read_text()
PROMISES = [line for line in CONTRACT.splitlines() if line.startswith("- ")]
NAMED = re.compile(r"`(tests/\w+/\w+\.py)::(\w+)`")


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_promise_names_a_test() -> None:
    assert len(PROMISES) > 30
    assert [line for line in PROMISES if not NAMED.search(line)] == []


def test_every_named_test_exists() -> None:
    named = NAMED.findall(CONTRACT)
    assert len(named) >= len(PROMISES)
    assert [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in names_in(path)] == []


def test_what_looks_like_a_test_is_read_as_one() -> None:
    assert CONTRACT.count("::test_") == len(NAMED.findall(CONTRACT))


def test_the_readme_leads_there() -> None:
    assert "(docs/contract.md)" in (ROOT / "README.md").read_text()
