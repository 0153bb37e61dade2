"""The page of `plan --html`: a dot for every plan that was simulated, and a timeline of each that is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_html import PAGE
from test_others import ASKED, layers

import autopar
from autopar.planning.others import frontier, reasons
from autopar.planning.plan import Planned, planned
from autopar.planning.predict import Prediction
from autopar.report.page.plans import plans_page
from autopar.report.timeline.planned import planned_picture

NASTY = "</style><script>alert(1)</script>{PARETO}"


@pytest.fixture(scope="module")
def found() -> Planned:
    return planned(layers(), ASKED)


@pytest.fixture(scope="module")
def page(found: Planned) -> str:
    return plans_page(found, NASTY, list(reasons(found)))


def test_a_dot_a_plan(page: str, found: Planned) -> None:
    shown = {*found.found.tried, *found.found.best, *frontier(found)}
    titles = re.findall(r"<circle[^>]*><title>(.*?)\n", page)
    assert sorted(titles) == sorted(str(each.candidate) for each in shown) and len(titles) > 3
    points = re.findall(r'<polyline class="edge" points="(.*?)"', page)[0].split()
    assert len(points) == len(frontier(found))
    xs, ys = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert list(xs) == sorted(xs, reverse=True) and list(ys) == sorted(ys, reverse=True), "less memory, more time"


def test_every_link_has_its_timeline(page: str, found: Planned) -> None:
    links, places = set(re.findall(r'href="#(.*?)"', page)), re.findall(r'<section id="(.*?)"', page)
    assert links == set(places) and len(places) == len({*found.found.best, *frontier(found)})
    assert page.count('class="timeline"') == len(places)


def test_it_needs_nothing_else(page: str) -> None:
    assert "<script" not in page and "{" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S).replace(
        "{PARETO}", ""
    )
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)|src=", page.replace("http://www.w3.org/2000/svg", ""))
    assert page.index("<svg") > page.index("<h2>") and page.count('class="pareto"') == 1
    assert "default-src 'none'" in (PAGE / "plans.html").read_text()
    assert (Path(autopar.__file__).parent / "report" / "page" / "plans.html").is_file()


@pytest.mark.parametrize("fixed", [{"pp": 2}, {"pp": 2, "schedule": "interleaved-1f1b"}, {"pp": 1}], ids=str)
def test_the_timeline_is_as_long_as_the_step(fixed: dict[str, object], found: Planned) -> None:
    """Where all micro-batches are drawn."""
    made = best_with_few(fixed)
    picture = planned_picture(found, made)
    assert len(picture.lanes) == made.candidate.pp and picture.microbatches == made.candidate.microbatches
    once = 0.05 * made.total  # gradients that are added up
    assert picture.end_us == pytest.approx(made.total, abs=once)
    for lane in picture.lanes:
        ends = [(block.start_us, block.end_us) for block in lane.blocks]
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(ends))
        kinds = [block.action.kind for block in lane.blocks]
        assert kinds.count("F") == kinds.count("B") == made.candidate.microbatches * made.candidate.chunks


def best_with_few(fixed: dict[str, object]) -> Prediction:
    return planned(layers(), replace(ASKED, fixed={**ASKED.fixed, **fixed, "microbatches": 4})).found.best[0]
