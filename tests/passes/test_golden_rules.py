"""How every op of the table may be split, as text: a line for each sample, below the ops that have it.

Brute force (test_rules.py) says that no rule allows too much; these lines say that none allows less than it did. `make
golden` writes them, and the diff is reviewed like code.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_brute_force import Sample, make_call, tensors_in
from rule_samples_all import every_sample

from autopar.ir.program import TensorType
from autopar.passes import rules
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call, Rule

_PLAIN = (bool, int, float, str, tuple, list)
GOLDEN = Path(__file__).resolve().parent / "golden_rules"
KINDS = {kind.__name__.rpartition(".")[2]: kind.ROWS for kind in rules._KINDS}
KINDS["chains"] = {name: row for name, row in TABLE.items() if all(name not in rows for rows in KINDS.values())}


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    torch.manual_seed(0)
    return every_sample()


@pytest.mark.parametrize("kind", KINDS)
def test_rules_golden(kind: str, samples: dict[str, list[Sample]]) -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the ops are those of torch 2.13")
    alike = defaultdict[str, list[str]](list)
    for name in KINDS[kind]:
        alike["".join(dict.fromkeys(_lines(name, samples[name])))].append(name)
    path, text = GOLDEN / f"{kind}.txt", "\n".join(f"{' '.join(names)}\n{lines}" for lines, names in alike.items())
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def _lines(name: str, samples: list[Sample]) -> Iterator[str]:
    for one in samples:
        call, _, _ = make_call(name, one)
        yield f"    {_called(call)} | {_shown(TABLE[name].rule(call))}\n"


def _called(call: Call) -> str:
    return f"{_types(call.operands)} -> {_types(call.results)} {_rest(call)}".strip()


def _types(types: tuple[TensorType, ...]) -> str:
    return ", ".join(f"{list(type_.shape)}".replace(" ", "") for type_ in types)


def _rest(call: Call) -> str:
    """The arguments that are no tensors, and say which rule it is."""
    others = [f"{arg}" for arg in call.args if isinstance(arg, _PLAIN) and not tensors_in([arg])]
    named = [f"{key}={arg}" for key, arg in call.kwargs.items() if isinstance(arg, _PLAIN)]
    return " ".join([*others, *named])


def _shown(rule: Rule) -> str:
    """Names of dims, sizes, and all else that is not as in most rules."""
    operands, results = (", ".join(map(_dims, side)) for side in (rule.operands, rule.results))
    sizes = " ".join(f"{name}={size}" for name, size in rule.sizes.items())
    rest = [f"{field.name}={_sorted(value)}" for field in fields(Rule)[3:] if (value := getattr(rule, field.name))
            != field.default]  # fmt: skip
    return " ".join([f"{operands} -> {results}; {sizes};", *rest])


def _dims(dims: Any) -> str:
    return "[" + " ".join("(" + " ".join(names) + ")" if len(names) != 1 else names[0] for names in dims) + "]"


def _sorted(value: Any) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(str, value))) + "}"
    return "(" + ", ".join(map(_sorted, value)) + ")" if isinstance(value, tuple) else str(value)
