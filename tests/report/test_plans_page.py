"""The page of `plan --html`: a dot for every plan that was simulated, and a timeline of each that is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_html import PAGE, browser  # noqa: F401  one is a fixture
from test_others import ASKED, layers

import autopar
from autopar.planning.others import frontier, reasons
from autopar.planning.planner import Planned, planned
from autopar.planning.price.predict import Prediction
from autopar.report.page.plans_page import Scale, plans_page
from autopar.report.timeline.planned import planned_picture

NASTY = "</style><script>alert(1)</script>{PARETO}"


@pytest.fixture(scope="module")
def found() -> Planned:
    return planned(layers(), ASKED)


@pytest.fixture(scope="module")
def page(found: Planned) -> str:
    return plans_page(found, NASTY, list(reasons(found)))


@pytest.fixture(scope="module")
def line(found: Planned) -> list[Prediction]:
    return frontier(found)


@pytest.fixture(scope="module")
def tight(found: Planned) -> str:
    """A page where the plans that are faster do not fit."""
    less = planned(layers(), replace(ASKED, memory=0.99 * found.found.best[0].memory, top=3))
    return plans_page(less, NASTY, list(reasons(less)))


def test_a_dot_a_plan(page: str, found: Planned, line: list[Prediction]) -> None:
    shown = {*found.found.tried, *found.found.best, *line}
    titles = re.findall(r"<circle[^>]*><title>(.*?)\n", page)
    assert sorted(titles) == sorted(str(each.candidate) for each in shown) and len(titles) > 3
    points = re.findall(r'<polyline class="edge" points="(.*?)"', page)[0].split()
    assert len(points) == len(line)
    xs, ys = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert list(xs) == sorted(xs, reverse=True) and list(ys) == sorted(ys, reverse=True), "less memory, more time"


def test_every_link_has_its_timeline(page: str, found: Planned, line: list[Prediction]) -> None:
    links, places = set(re.findall(r'href="#(.*?)"', page)), re.findall(r'<section id="(.*?)"', page)
    assert links == set(places) and len(places) == len({*found.found.best, *line})
    assert page.count('class="timeline"') == len(places)


def test_it_needs_nothing_else(page: str) -> None:
    bare = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S)
    assert page.count("<script") == 1 and "{" not in bare.replace("{PARETO}", "")
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
        backward = kinds.count("B") or kinds.count("I") or -1
        assert kinds.count("F") == backward == made.candidate.microbatches * made.candidate.chunks


def best_with_few(fixed: dict[str, object]) -> Prediction:
    return planned(layers(), replace(ASKED, fixed={**ASKED.fixed, **fixed, "microbatches": 4})).found.best[0]


def test_a_narrow_scale_has_ticks_too() -> None:
    """Of times that differ little hardly any is 1, 2 or 5 times a power of ten."""
    for low, high in ((2.1e6, 2.9e6), (9.8e5, 1.3e6), (3.0, 3.1), (1.0, 8.0), (1.0, 1e6), (7.0, 7.0)):
        scale = Scale.of([low, high], 0, 100)
        ticks = scale.ticks()
        assert 2 < len(ticks) < 20 and all(scale.low <= tick <= scale.high for tick in ticks), (low, high, ticks)


# ---- in a browser

OVERLAPS = """() => {
  const box = (one) => one.getBoundingClientRect();
  const boxes = (kind) => [...document.querySelectorAll(kind)].map((one) => [one.textContent, box(one)]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const texts = boxes('.pareto text'), dots = boxes('.pareto circle'), plot = box(document.querySelector('.pareto'));
  const later = (i, box) => texts.slice(i + 1).filter(([, other]) => meet(box, other));
  return [
    ...texts.flatMap(([a, box], i) => later(i, box).map(([b]) => a + ' | ' + b)),
    ...texts.filter(([, box]) => dots.some(([, dot]) => meet(box, dot))).map(([a]) => a + ' on a dot'),
    ...texts.filter(([, box]) => box.left < plot.left || box.right > plot.right).map(([a]) => a + ' is cut'),
  ];
}"""


@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(width: int, browser: Any, tight: str, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "page.html"
    file.write_text(tight, encoding="utf-8")
    page, faults, requests = browser.new_page(viewport={"width": width, "height": 800}), [], []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert page.inner_text("h1") == f"Plans of {NASTY}" and page.locator(".pareto .limit").count() == 1
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width, "what is wide scrolls by itself"
    assert page.locator("tr").count() == 1 + page.locator("section").count()
    step, rates = page.locator("th", has_text="step"), page.locator("td:nth-child(3)")
    step.click()
    first = rates.all_inner_texts()
    step.press("Enter")
    assert step.get_attribute("aria-sort") == "descending" and rates.all_inner_texts() == first[::-1] != first
    numbers = [float(rate.replace(",", "")) for rate in first]
    assert numbers == sorted(numbers, reverse=True), "the shorter the step, the more tokens a second"
    page.locator("circle.edge-dot").first.hover()
    assert page.locator("#tip").is_visible() and page.locator("tr.lit").count() == 1
    assert re.search(r"\d [kMG]?B$", page.inner_text("#tip"))
    page.mouse.move(1, 1)
    assert not page.locator("#tip").is_visible() and page.locator(".lit").count() == 0
    page.locator("td a").last.click()
    assert page.locator("section:target").is_visible() and page.locator("section:target .timeline").count() == 1
    assert not faults and [url[:7] for url in requests] == ["file://"]
