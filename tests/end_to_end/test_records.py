"""Figures of benchmarks: RESULTS.md is what the files of benchmarks/results say, and a figure survives its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.records import FOLDER, PAGE, Figure, Records, append, page, read


def test_the_page_is_that_of_the_files() -> None:
    """`python -m benchmarks.records` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_the_figures_of_a_file_are_complete(path: Path) -> None:
    figures = read(path)
    assert figures
    for figure in figures:
        assert figure.goal[:2] in ("<=", ">=", ""), figure
        assert figure.date and figure.machine and figure.case and figure.metric and figure.unit, figure


def test_a_figure_comes_back_from_its_file(tmp_path: Path) -> None:
    figures = [
        Figure("a, b", "time", "ms", 723.25, 751.0, "<=1.0", "2026-11-26", "1dc1af0", "2 cores", 1.5),
        Figure("c", "compiled", "s CPU", 6.5, goal="<=8", date="2026-11-26", machine="2 cores", yardstick=1.02),
    ]
    append(tmp_path / "x.csv", figures[:1])
    append(tmp_path / "x.csv", figures[1:])
    assert read(tmp_path / "x.csv") == figures


def test_a_row_that_is_none_is_named(tmp_path: Path) -> None:
    append(tmp_path / "x.csv", [Figure("c", "time", "ms", 1.0)])
    with (tmp_path / "x.csv").open("a") as file:
        file.write("2026-11-26,,,,,c,time,ms,many,,\n")
    with pytest.raises(ValueError, match="line 3"):
        read(tmp_path / "x.csv")


def test_goal_and_best_are_of_the_ratio_or_of_the_reference_day() -> None:
    assert Figure("c", "time", "ms", 95.0, 100.0, "<=1.0").is_met
    assert not Figure("c", "time", "ms", 105.0, 100.0, "<=1.0").is_met
    assert Figure("c", "planned", "s CPU", 18.0, goal="<=15", yardstick=1.3).is_met
    assert Figure("c", "right", "rows", 96.0, goal=">=95").is_met
    assert Figure("c", "right", "rows", 94.0, goal=">=").is_met is None


def test_nothing_is_recorded_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.records.FOLDER", tmp_path)
    Records("x", is_wanted=False).add(Figure("c", "time", "ms", 1.0))
    assert not list(tmp_path.iterdir())
    Records("x", is_wanted=True).add(Figure("c", "time", "ms", 1.0))
    (found,) = read(tmp_path / "x.csv")
    assert found.date and found.machine and found.load is not None
