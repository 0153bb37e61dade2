"""The tables of benchmarks.coverage, on a row each: they are run by hand, and must run."""

from __future__ import annotations

import pytest
import torch
from processes import Ranks

from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from benchmarks.coverage import measure, ranks
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


@pytest.mark.parametrize("mesh", ranks.MESHES)
def test_a_row_in_float32_on_two_ranks(two: Ranks, mesh: str) -> None:
    row, other = two.run(ranks.train, NAME, mesh, 2, True)
    assert other is None and row.verdict == "ok", row
    assert row.ours.keys() == row.plain.keys() == {"loss", "gradient", "state"}
    assert 0 < row.ours["gradient"] < 1e-5, "both sides are float32"
    assert ranks.line("kind", row).startswith("| ok | kind | transformer |")


def test_what_is_off_by_more_than_float32_is_seen() -> None:
    """Of each kind of tensor one in which something is wrong: a gradient off by 1e-4, an update left out, a dtype."""
    weight, step = torch.randn(4, 4), 1e-3 * torch.randn(4, 4)
    right = {("loss", "loss"): torch.rand(()) + 1, ("gradient", "w"): torch.randn(4, 4), ("state", "w"): weight + step}
    exact = {key: value.double() for key, value in right.items()}
    noisy = {key: value * (1 + 1e-7 * torch.randn(value.shape)) for key, value in right.items()}

    def judged(key: tuple[str, str] | None, value: torch.Tensor | None) -> ranks.Row:
        row, given = ranks.Row("model", "dp=2"), {**noisy, **({} if key is None or value is None else {key: value})}
        if key is not None and value is None:
            del given[key]
        ranks._judge(row, {"w": weight}, [given], [[noisy]], [exact])
        return row

    assert judged(None, None).verdict == "ok"
    gradient = right["gradient", "w"].clone()
    gradient[0, 0] += 1e-4
    wrong = {
        ("loss", "loss"): right["loss", "loss"] * (1 + 1e-5),
        ("gradient", "w"): gradient,
        ("state", "w"): weight,
    }
    for key, value in wrong.items():
        row = judged(key, value)
        assert row.verdict == "NO" and " ".join(key) in row.worst, row
        assert judged(key, value * torch.nan).verdict == "NO"
    assert "one side alone" in judged(("gradient", "w"), None).fault
