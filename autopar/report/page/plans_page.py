"""The page that `autopar plan --html` writes: time against memory of all plans, and the timeline of the best ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib import resources

from autopar.planning.others import MOST, frontier
from autopar.planning.planner import Planned
from autopar.planning.price.predict import Prediction
from autopar.report.page.pareto import pareto_svg
from autopar.report.plans import HEADS, head_line, row_of
from autopar.report.timeline.planned import planned_picture
from autopar.report.timeline.svg import timeline_svg


def plans_page(found: Planned, title: str, reasons: Sequence[str]) -> str:
    """The whole page; it needs no network and no script. reasons: why other plans lost, a line each."""
    best, line = found.found.best, frontier(found)
    shown = list(dict.fromkeys([*best, *line]))
    places = {made: f"plan-{i}" for i, made in enumerate(shown)}
    parts = {
        "TITLE": escape(f"Plans of {title}"),
        "HEAD": escape(head_line(found)),
        "CERTIFICATE": escape(found.certificate),
        "MOST": str(MOST),
        "PARETO": pareto_svg(list(dict.fromkeys([*found.found.tried, *shown])), line, found.asked.limit, places),
        "TABLE": "\n".join(_table(found, shown, places)),
        "REASONS": "\n".join(f"<li>{escape(reason)}</li>" for reason in reasons),
        "TIMELINES": "\n".join(_timeline(found, made, place) for made, place in places.items()),
    }
    page = resources.files(__package__).joinpath("plans.html").read_text(encoding="utf-8")
    return re.sub(r"\{([A-Z]+)\}", lambda match: parts[match[1]], page)  # at once: a title may hold anything


def _table(found: Planned, shown: Sequence[Prediction], places: dict[Prediction, str]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in HEADS)}</tr>"
    for made in shown:
        first, *others = row_of(found, made)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f'<tr><td><a href="#{places[made]}">{escape(first)}</a></td>{cells}</tr>'
    yield "</table>"


def _timeline(found: Planned, made: Prediction, place: str) -> str:
    picture = planned_picture(found, made)
    name, *captions = picture.captions  # outside of the picture, where they break into lines
    heading = f"<h3>{escape(name)}</h3>{''.join(f'<p>{escape(caption)}</p>' for caption in captions)}"
    lanes = timeline_svg(replace(picture, captions=()))
    return f'<section id="{place}">{heading}<div class="scroll">{lanes}</div></section>'
