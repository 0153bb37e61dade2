"""The page that `autopar plan --html` writes: time against memory of all plans, and the timeline of the best ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources

from autopar.ir.ops.measure import human
from autopar.planning.others import MOST, frontier
from autopar.planning.planner import Planned
from autopar.planning.price.predict import Prediction
from autopar.planning.price.step_report import time_text
from autopar.report.plans import HEADS, head_line, row_of
from autopar.report.timeline.planned import planned_picture
from autopar.report.timeline.svg import timeline_svg

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 440, 80, 24, 36, 44
MARGIN = 1.15  # of the values, at both ends of a scale
NARROW = 5.0  # scales of which the ends are closer than by this factor have ticks at equal distances
LABEL = 90  # pixels of the longest one beside the limit


def plans_page(planned: Planned, title: str, reasons: Sequence[str]) -> str:
    """The whole page; it needs no network, and its script only to sort and to point. reasons: why other plans lost, a
    line each."""
    best, line = planned.found.best, frontier(planned)
    shown = list(dict.fromkeys([*best, *line]))
    places = {made: f"plan-{i}" for i, made in enumerate(shown)}
    parts = {
        "TITLE": escape(f"Plans of {title}"),
        "HEAD": escape(head_line(planned)),
        "CERTIFICATE": escape(planned.certificate),
        "MOST": str(MOST),
        "PARETO": pareto_svg(list(dict.fromkeys([*planned.found.tried, *shown])), line, planned.asked.limit, places),
        "TABLE": "\n".join(_table(planned, shown, places)),
        "REASONS": "\n".join(f"<li>{escape(reason)}</li>" for reason in reasons),
        "TIMELINES": "\n".join(_timeline(planned, made, place) for made, place in places.items()),
    }
    parts["SCRIPT"], page = (_file(name) for name in ("plans.js", "plans.html"))
    return re.sub(r"\{([A-Z]+)\}", lambda match: parts[match[1]], page)  # at once: a title may hold anything


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _table(planned: Planned, shown: Sequence[Prediction], places: dict[Prediction, str]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in HEADS)}</tr>"
    for made in shown:
        first, *others = row_of(planned, made)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f'<tr><td><a href="#{places[made]}">{escape(first)}</a></td>{cells}</tr>'
    yield "</table>"


def _timeline(planned: Planned, made: Prediction, place: str) -> str:
    picture = planned_picture(planned, made)
    name, *captions = picture.captions  # outside of the picture, where they break into lines
    heading = f"<h3>{escape(name)}</h3>{''.join(f'<p>{escape(caption)}</p>' for caption in captions)}"
    lanes = timeline_svg(replace(picture, captions=()))
    return f'<section id="{place}">{heading}<div class="scroll">{lanes}</div></section>'


# -- the chart of plans -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels: `low` at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> Scale:
        return cls(max(min(values), 1e-9) / MARGIN, max(*values, 1e-9) * MARGIN, start, end)

    def __call__(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times a power of ten; on a narrow scale, which has hardly any of them, 4 to 10 equal steps."""
        if self.high / self.low < NARROW:
            return self._equal()
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [n * 10.0**power for power in powers for n in (1, 2, 5) if self.low <= n * 10.0**power <= self.high]

    def _equal(self) -> list[float]:
        least = (self.high - self.low) / 10
        power = 10.0 ** math.floor(math.log10(least))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def pareto_svg(
    plans: Sequence[Prediction], line: Sequence[Prediction], limit: float, places: Mapping[Prediction, str]
) -> str:
    """All plans, of which `line` are the fastest by memory. limit: bytes that fit. places: of the plans to go to."""
    across = Scale.of([made.memory for made in plans], LEFT, WIDTH - RIGHT)
    up = Scale.of([made.total for made in plans], HEIGHT - BOTTOM, TOP)
    edge = " ".join(f"{across(made.memory)},{up(made.total)}" for made in line)
    dots = [_dot(made, made in line, made.memory <= limit, across, up, places.get(made)) for made in plans]
    parts = [*_grid(across, up), *_limit(across, limit), f'<polyline class="edge" points="{edge}"/>', *dots]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    inner = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="pareto" {size} role="img">\n{inner}\n</svg>'


def _grid(across: Scale, up: Scale) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for value in across.ticks():
        x = across(value)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{human(value)}</text>'
    for value in up.ticks():
        y = up(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{time_text(value)}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">memory of a device</text>'
    yield f'<text x="8" y="{TOP - 20}">time of a step</text>'


def _limit(across: Scale, limit: float) -> Iterator[str]:
    if across.low < limit < across.high:
        x = across(limit)
        yield f'<line class="limit" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        side = "end" if x > WIDTH - RIGHT - LABEL else "start"
        yield f'<text x="{x}" y="{TOP - 6}" text-anchor="{side}">{human(limit)} fit</text>'


def _dot(made: Prediction, is_edge: bool, fits: bool, across: Scale, up: Scale, place: str | None) -> str:
    kind = "edge-dot" if is_edge else "fits" if fits else "far"
    title = escape(f"{made.candidate}\n{time_text(made.total)}, {human(made.memory)}")
    where = f'cx="{across(made.memory)}" cy="{up(made.total)}" r="{5 if is_edge else 3.5}"'
    dot = f'<circle class="{kind}" {where}><title>{title}</title></circle>'
    return dot if place is None else f'<a href="#{place}">{dot}</a>'
