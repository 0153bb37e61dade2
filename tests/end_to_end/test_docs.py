"""The pages: links lead somewhere, the menu has every page, the reference all public names. `make docs` checks more."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

import autopar
from autopar.passes import PASSES
from autopar.torch_compat import TRIED, TRIED_TEXT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
DECISIONS = sorted(page for page in (DOCS / "decisions").glob("*.md") if page.name != "index.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names that MkDocs gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub(lambda code: code[0].strip("`"), page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return frozenset(re.sub(r"[-\s]+", "-", heading) for heading in plain)


def is_dead(link: str, page: Path) -> bool:
    """Whether a link of a page leads to no file, or to a heading that its file has not."""
    if "://" in link:
        return False
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.is_file() or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text()))
    assert [link for link in links if is_dead(link, page)] == []


def test_dead_links_are_seen() -> None:
    page = DOCS / "memory.md"
    assert [is_dead(link, page) for link in ("cli.md", "#zero", "nothing.md", "cli.md#nothing", "#nothing")] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_the_menu_has_every_page() -> None:
    menu = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    outside = {
        "index.md",
        *(f"{page}.md" for page in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        "examples/README.md",
        *(f"benchmarks/{page}.md" for page in ("COVERAGE", "GPU", "LIBRARIES", "MUTANTS", "PORTS", "RESULTS")),
    }
    assert menu - outside == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: autopar\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(autopar.__all__)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_four_parts(page: Path) -> None:
    for decision in page.read_text().split("\n## ")[1:]:
        parts = re.findall(r"^\*\*(Context|Decision|Refused|Consequence)\b", decision, re.MULTILINE)
        assert parts == ["Context", "Decision", "Refused", "Consequence"], decision.splitlines()[0]


def test_the_order_of_passes_has_every_pass() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "decisions" / "passes.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [step.__name__ for step, _ in PASSES]


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_say_which_versions_of_torch_were_tried(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"torch(?: \|)? (2\.\d+ to 2\.\d+)", text)) == {TRIED_TEXT}
    oldest = ".".join(map(str, TRIED[0]))
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
