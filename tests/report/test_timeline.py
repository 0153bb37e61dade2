"""Drawings of timelines: the same blocks everywhere, in the terminal, as SVG and as a page in a real browser."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pipelines import flow_of
from rich.console import Console
from rich.text import Text
from test_html import browser  # noqa: F401  a fixture

import autopar.report.timeline
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import Costs, Timeline
from autopar.passes.schedules import parse_schedule, simulate, with_transfers
from autopar.report.timeline import picture, timeline_page, timeline_svg, timeline_text
from autopar.report.timeline.picture import Picture, bubble_of, ticks, time_text

LETTERS = """\
schedule 'gpipe': 2 ranks, 2 stages, 2 micro-batches
simulated: 9.02 ms a step, idle 33.5%

rank 0 F0---F1--..............B0-------B1-------  idle 33.5%
rank 1 .....F0--F1---B0-------B1-------.........  idle 33.5%
       |0 us                  |5 ms

        F forward    B backward    . idle"""
LETTERS = """\
schedule 'gpipe': 2 ranks, 2 stages, 2 micro-batches
simulated: 9 ms a step, idle 33.3%

rank 0 F0---F1--..............B0-------B1-------  idle 33.3%
rank 1 .....F0--F1---B0-------B1-------.........  idle 33.3%
       |0 us                  |5 ms

        F forward    B backward    . idle"""
FOLDER = Path(autopar.report.timeline.__file__).parent


def pipeline(name: str, ranks: int, microbatches: int) -> tuple[Pipeline, Timeline]:
    """A pipeline without graphs, of which a forward takes 1 ms, I and W too; and its timeline."""
    known = parse_schedule(name, ranks, microbatches)
    flow = flow_of(known.ranks, microbatches, "FIW" if known.kinds & {"I"} else "FB")
    times = {key: {"F": 1e3, "I": 1e3, "W": 1e3, "B": 2e3}.get(key[1], 0.0) for key in flow.works}
    costs = Costs(times)
    lists = with_transfers(known.orders, flow, costs)
    made = Pipeline(Mesh((("pp", ranks),)), flow, {}, {}, {}, costs, name, lists)
    return made, simulate(lists, flow, costs)


def drawn(name: str, ranks: int, microbatches: int) -> Picture:
    return picture(*pipeline(name, ranks, microbatches))


def test_a_picture_is_the_timeline():
    made, simulated = pipeline("1f1b", 2, 4)
    shown = picture(made, simulated)
    assert [lane.name for lane in shown.lanes] == ["rank 0", "rank 1"] and shown.kinds == ("F", "B")
    for rank, lane in enumerate(shown.lanes):
        runs = [span for span in simulated.runs(rank) if span.end_us > span.start_us]
        assert [(block.action, block.start_us, block.end_us) for block in lane.blocks] == [
            (span.instruction.action, span.start_us, span.end_us) for span in runs
        ]
        assert lane.idle == simulated.bubble(rank)
    assert shown.captions == (
        "schedule '1f1b': 2 ranks, 2 stages, 4 micro-batches",
        f"simulated: 15 ms a step, idle {bubble_of(simulated):.1%}",
    )


def test_letters_without_colours():
    assert timeline_text(drawn("gpipe", 2, 2), 60, False).plain == LETTERS


def test_colours_fill_the_width():
    console = Console(width=100, force_terminal=True, color_system="truecolor", record=True, file=io.StringIO())
    shown = drawn("zb-v", 4, 8)
    console.print(Text.assemble(*timeline_text(shown, 100, True).parts))
    lines = console.export_text().splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == 4 and {len(row) for row in rows} == {100}
    assert "▌" in rows[0] and "░" in rows[3] and "W weight grad" in "\n".join(lines)


def test_svg_stands_alone():
    shown = drawn("interleaved-1f1b", 2, 4)
    root = ElementTree.fromstring(timeline_svg(shown))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    blocks = [one for one in root.iter() if "b" in one.get("class", "").split()]
    assert len(blocks) == sum(len(lane.blocks) for lane in shown.lanes) == 2 * 2 * 2 * 4
    assert {one.get("class", "").split()[1] for one in blocks} == {"F0", "F1", "B0", "B1"}, "a shade for each chunk"
    titles = [one[0].text for one in blocks]
    assert titles[0] == "0F0: forward of stage 0, micro-batch 0\n0 us to 1 ms (1 ms)"
    assert "idle" in "".join(root.itertext())


def test_files_ask_the_network_for_nothing():
    for file in FOLDER.iterdir():
        if file.suffix in (".html", ".css", ".js"):
            assert not re.search(r"https?:|//cdn|@import|fetch\(|XMLHttp|innerHTML|src=", file.read_text()), file
    shown = drawn("1f1b", 2, 4)
    page = timeline_page(shown, "</script><img src=x>")
    assert "<img" not in page and page.count("</script>") == 1
    assert not re.search(r"https?:", (page + timeline_svg(shown)).replace("http://www.w3.org/2000/svg", ""))


def test_many_ranks_and_microbatches_are_drawn_at_once():
    made, simulated = pipeline("interleaved-1f1b", 16, 128)
    start = time.process_time()
    shown = picture(made, simulated)
    sizes = [len(timeline_svg(shown)), len(timeline_page(shown, "large")), len(timeline_text(shown, 200, True).plain)]
    assert time.process_time() - start < 3
    assert max(sizes) < 5e6


@pytest.mark.parametrize(("us", "text"), [(0.0, "0 us"), (12.34, "12.3 us"), (1500, "1.5 ms"), (2e6, "2 s")])
def test_times(us: float, text: str):
    assert time_text(us) == text


def test_ticks_are_round():
    assert ticks(9000, 5) == [0, 2000, 4000, 6000, 8000]
    assert ticks(0, 5) == [0] and len(ticks(123456.7, 14)) <= 15


def test_a_person_looks_at_a_page(browser: Any, tmp_path: Path):  # noqa: F811
    file = tmp_path / "timeline.html"
    file.write_text(timeline_page(drawn("zb-v", 4, 32), "a pipeline"), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1200, "height": 500})
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    width = "document.querySelector('svg.timeline').clientWidth"
    before = page.evaluate(width)
    block = page.locator("rect.b.m3").first
    block.hover()
    assert "micro-batch 3" in page.inner_text(".t-tip") and page.locator(".t-tip").is_visible()
    block.click()
    opacity = "getComputedStyle(document.querySelector('rect.b.m{}')).opacity"
    assert page.evaluate(opacity.format(3)) == "1" and float(page.evaluate(opacity.format(4))) < 0.5
    block.click()
    assert page.evaluate(opacity.format(4)) == "1", "a second click ends it"
    hidden = "[...document.querySelectorAll('text.l')].filter((one) => one.style.display === 'none').length"
    few = page.evaluate(hidden)
    for _ in range(4):
        page.locator("[data-zoom='1.5']").click()
    assert page.evaluate(width) > 3 * before and page.evaluate(hidden) < few
    page.locator("[data-zoom='0']").click()
    assert abs(page.evaluate(width) - before) <= 2 and not faults
