"""docs/spellings.md: each way to write a form becomes what the table says, and has the numbers of one device."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from verified import verified

from benchmarks.spellings.form import LOST, REACHED, Form, Outcome, outcomes
from benchmarks.spellings.forms import FORMS
from benchmarks.spellings.table import counts_in, rows_of, with_table

PAGE = (ROOT / "docs" / "spellings.md").read_text()
# Ways, and how many are reached. A form may gain; what is lost here is a fault of the compiler, not of the table.
LEAST = {
    "without the last position": (24, 22), "labels one position on": (10, 9), "a causal mask": (20, 19),
    "causal, with padding": (15, 13), "a window": (12, 12), "documents": (13, 11),
    "a mask that is shown otherwise": (16, 13), "RMSNorm": (13, 13), "LayerNorm": (11, 11),
    "rotary positions": (16, 16), "a linear recurrence": (14, 11), "cross entropy": (17, 16),
    "a mean over the tokens that count": (21, 19),
}  # fmt: skip
EVERY = 4  # of how many ways one is tried in `make test`
form_ = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.title)


def others(form: Form) -> str:
    """What the table says is not reached."""
    (row,) = re.findall(rf"^\| {re.escape(form.title)} \| \d+ \|.*$", PAGE, re.MULTILINE)
    return row.rpartition(" | ")[2]


def as_told(form: Form, found: list[Outcome]) -> None:
    for one in found:
        assert one.result != LOST, f"{form.title}: {one.way} is not reached, and nothing says so"
        assert (one.result != REACHED) == (f"`{one.way}`" in others(form)), one


@form_
def test_a_way_is_what_the_table_says(form: Form) -> None:
    shift = FORMS.index(form) % EVERY
    as_told(form, outcomes(form, list(form.ways)[shift::EVERY]))


@pytest.mark.slow
@form_
def test_every_way_is_what_the_table_says(form: Form) -> None:
    found = outcomes(form)
    as_told(form, found)
    assert rows_of(form, found) in PAGE, "python -m benchmarks.spellings --write"


@form_
def test_the_numbers_are_those_of_one_device(form: Form) -> None:
    """The last way of each form that is reached, in `make test`."""
    _equal(form, [way for way in form.ways if f"`{way}`" not in others(form)][-1])


@pytest.mark.slow
@form_
def test_the_numbers_of_every_way(form: Form) -> None:
    for way in form.ways:
        if f"`{way}`" not in others(form):
            _equal(form, way)


def _equal(form: Form, way: str) -> None:
    body = form.ways[way]
    verified(form.model(body), [form.mesh], form.loss(body), form.batch, steps=1, **form.options)


def test_no_count_shrinks() -> None:
    counts = counts_in(PAGE)
    assert counts.keys() == LEAST.keys() == {form.title for form in FORMS}
    for title, (ways, reached) in LEAST.items():
        assert counts[title][0] >= ways and counts[title][1] >= reached, title
        assert sum(counts[title][1:]) == counts[title][0]
    assert {form.title: len(form.ways) for form in FORMS} == {title: count[0] for title, count in counts.items()}
    assert all(len(form.ways) >= 10 for form in FORMS)


def test_a_table_is_written_where_the_page_has_one() -> None:
    form = FORMS[0]
    found = [Outcome(form.title, "a | b", LOST), Outcome(form.title, "c", REACHED)]
    page = with_table("before\n<!-- table -->\nold\n<!-- end -->\nbehind", {form: found})
    assert page.startswith("before\n<!-- table -->\n| form |") and page.endswith("<!-- end -->\nbehind")
    assert counts_in(page) == {form.title: (2, 1, 0, 0)} and "`a \\| b`" in page
