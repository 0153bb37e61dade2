"""A part of `benchmarks.specs`, `hostile`, `headers` and `uncapturable`: what is wrong ends in words."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.errors import MachineError, PlanError, ScheduleError
from autopar.machines.files import read_machine
from autopar.planning.space.decisions import read_plan
from benchmarks import headers, hostile, specs, uncapturable

SECONDS = 40


def test_wrong_specs_are_refused_in_words() -> None:
    found, tried = specs.faults(5, range(70), SECONDS)
    assert not found, found
    assert tried > 20


def test_damaged_files_are_refused_by_name() -> None:
    found, tried = hostile.faults(5, range(70), SECONDS)
    assert not found, found
    assert tried > 20


def test_changed_headers_are_refused_by_name() -> None:
    found, tried = headers.faults(5, range(60), SECONDS)
    assert not found, found
    assert tried > 20


def test_models_that_cannot_be_captured_are_refused_with_their_line() -> None:
    assert len(uncapturable.ROWS) >= 60
    found = uncapturable.faults(uncapturable.ROWS[::5], "dp=2")
    assert not found, found


def test_the_tester_sees_a_model_that_is_none_of_these() -> None:
    found = uncapturable.faults([lambda net, x: net.down(net.up(x))], "dp=2")
    assert list(found.values()) == ["no error"]


def test_the_tester_sees_another_error() -> None:
    assert specs.fault_of(lambda: int("x")) == "ValueError: invalid literal for int() with base 10: 'x'"


DIGITS, DEEP = "9" * 5000, "[" * 100_000


@pytest.mark.parametrize("text, words", [
    (f"zero = {DIGITS}", "is no TOML: Exceeds the limit"), (f"zero = {DEEP}", "nested too deep"),
    ("\0", "is no TOML"), ("\udcff", "is no text in UTF-8: invalid start byte at byte 0"),
])  # fmt: skip
def test_one_reader_of_text(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "there"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(PlanError, match=words):
        read_plan(path)
    with pytest.raises(MachineError, match=words):
        read_machine(path)


@pytest.mark.parametrize(
    "path, words", [("a\0b", r"plan 'a\\x00b': .*null"), ("x" * 300, "too long"), ("/", "is a folder")]
)
def test_paths(path: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_plan(path)


@pytest.mark.parametrize("table, words", [
    ("0F0,99999999999F0\n", "is not an action such as '0F1'"), ("0F0,999999F0,0B0\n,", "1000000 stages have at least"),
    ("x" * 200_000 + ",0F0", r"\(200000 characters\)|field larger than"), ("0F٣,0B0", "is not an action"),
])  # fmt: skip
def test_tables_of_actions(table: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        specs._compile("pp=2", schedule=table)


def test_many_stages_are_refused_before_they_are_ordered() -> None:
    with pytest.raises(autopar.AutoparError, match=r"1000000 stages are more than the \d+ calls"):
        specs._compile("pp=1000000")
