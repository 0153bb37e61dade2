"""docs/ideas: each program text of a page is what the compiler prints, each Python line gives what stands below it."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from typer.testing import CliRunner

from autopar.cli.commands import app

FOLDER = ROOT / "docs" / "ideas"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")
PARTS = ["Problem", "Example", "Why it is right", "Where it is"]
MOST = 120  # characters of a line, links apart


def blocks(page: Path, language: str) -> list[list[str]]:
    return [block.splitlines() for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)]


@cache
def said(command: str) -> list[str]:
    """What a command of a page prints, without comments; `cat` is of a golden program, which its own test holds."""
    name, *words = shlex.split(command)
    if name == "cat":
        text = (ROOT / words[0]).read_text()
    else:
        text = CliRunner().invoke(app, words, env={"COLUMNS": "400", "TERM": "dumb"}, catch_exceptions=False).output
    return [line.split("   #")[0].rstrip() for line in text.splitlines()]


def is_said(shown: str, line: str) -> bool:
    """Whether a line of a page is one of an output; `...` stands for a part that is left out."""
    return re.fullmatch(".*".join(map(re.escape, shown.rstrip().split("..."))), line) is not None


def missing(shown: list[str]) -> list[str]:
    """The lines below a command that it does not print, in this order."""
    command, *lines = shown
    left, found = iter(said(command.removeprefix("$ "))), []
    for line in lines:
        found += [] if any(is_said(line, one) for one in left) else [line]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_is_so(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(FOLDER)
    assert [line for block in blocks(page, "text") for line in missing(block)] == []
    code, runner = blocks(page, "python"), doctest.DocTestRunner(verbose=False)
    lines = [line for block in code if block[0].startswith(">>>") for line in [*block, ""]]
    runner.run(doctest.DocTestParser().get_doctest("\n".join(lines), {}, page.name, str(page), 0))
    assert runner.failures == 0
    for path, *quoted in (block for block in code if not block[0].startswith(">>>")):
        assert "\n".join(quoted) in (ROOT / path.removeprefix("# ")).read_text(), path
    assert len(blocks(page, "text")) + len(code) >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_four_parts_and_names_files_that_are_there(page: Path) -> None:
    text, files = page.read_text(), {str(path.relative_to(ROOT)) for path in ROOT.glob("[!.b]*/**/*.py")}
    assert re.findall(r"^## (.*)$", text, re.M) == PARTS
    assert [line for line in re.sub(r"\]\([^)]*\)", "", text).splitlines() if len(line) > MOST] == []
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert named and [one for one in named if not any(f"/{path}".endswith(f"/{one}") for path in files)] == []


def test_the_index_has_a_line_for_each_idea() -> None:
    assert sorted(re.findall(r"^\| \[.*?\]\((\w+\.md)\) \|", (FOLDER / "index.md").read_text(), re.M)) == [
        page.name for page in PAGES
    ]


def test_what_is_not_so_is_seen() -> None:
    shown = [line for line in blocks(FOLDER / "layout.md", "text")[0] if not line.startswith("%split")]
    assert missing(shown) == [] and missing([*shown, shown[1]]) == [shown[1]]  # in this order
    assert missing([shown[0], shown[1].replace("24", "25")]) != []


# -- docs/reading.md ------------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\| \d+ \| `(.*?)` \| (.*?) \| (\d+) \|$", (ROOT / "docs" / "reading.md").read_text(), re.M)


def test_the_first_day_is_as_long_as_it_says() -> None:
    """The files are there, with all that is to be read; lines within a tenth, in all within a twentieth."""
    lengths = []
    for path, names, said_lines in ROWS:
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        nodes = [defined[name] for name in re.findall(r"`(\w+)`", names)]
        lengths.append(sum((node.end_lineno or 0) - node.lineno + 1 for node in nodes))
        assert lengths[-1] == pytest.approx(int(said_lines), rel=0.1), path
    assert len(ROWS) == 10
    whole = sum(len((ROOT / path).read_text().splitlines()) for path, _, _ in ROWS)
    (read, of) = re.search(r"\(([\d,]+) lines of ([\d,]+)\)", (ROOT / "docs" / "reading.md").read_text()).groups()
    assert (sum(lengths), whole) == pytest.approx((int(read.replace(",", "")), int(of.replace(",", ""))), rel=0.05)
