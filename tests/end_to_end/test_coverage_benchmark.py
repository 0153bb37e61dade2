"""The two tables of benchmarks.coverage, on a row each: they are run by hand, and must run."""

from __future__ import annotations

import pytest

from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from benchmarks.coverage import measure
from benchmarks.coverage.context import row_of

NAME = "transformer"  # one of plain.MODELS: torch's own layers


def test_a_row_of_the_table() -> None:
    row = measure.Row(NAME)
    measure._fill(row)
    assert row.ok(is_transformer=True), row


def test_a_row_of_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.coverage.context.quiet", lambda: None)  # the other tests want their warnings
    found = row_of(NAME, "cp=2")
    captured = measure.captured_model(NAME)[-1]
    assert isinstance(found["error"], float) and found["error"] <= 1e-10, found
    assert found["share"] == measure.flops_split(lower(captured, parse_mesh("cp=2")), "cp")
    assert row_of(NAME, "cp=1000")["error"] is None  # refused, and said so
