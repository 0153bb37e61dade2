"""A timeline as one HTML page to zoom into; it needs no network and no server."""

from __future__ import annotations

from html import escape
from importlib import resources

from autopar.report.timeline.picture import COLOURS, KIND_NAMES, OTHER, Picture
from autopar.report.timeline.svg import GAP, HATCH, TOP, gap, lane_height, lanes_svg, style

WIDTH = 1200


def timeline_page(picture: Picture, title: str) -> str:
    """The whole page."""
    page = timeline_file("timeline.html")
    for name, text in (
        ("{STYLE}", style(picture)),
        ("{TITLE}", escape(title)),
        ("{TIMELINE}", timeline_html(picture)),
        ("{SCRIPT}", timeline_file("timeline.js")),
    ):
        page = page.replace(name, text, 1)
    return page


def timeline_html(picture: Picture) -> str:
    """The timeline as an element of a page that has `timeline.css` and `timeline.js`."""
    body, height = lanes_svg(picture, 0, WIDTH, 0, all_labels=True)
    rows = []
    for i, lane in enumerate(picture.lanes):
        tall = f'style="height: {lane_height(lane)}px; margin-bottom: {gap(picture, i)}px"'
        name = f'<span class="t-who{" measured" * lane.measured}">{escape(lane.name)}</span>'
        rows.append(f'<div class="t-row" {tall}>{name}<span class="share">{lane.idle:.1%}</span></div>')
    legend = "".join(
        f'<span><i style="background: rgb{COLOURS.get(kind, OTHER)[0]}"></i>{kind} {KIND_NAMES[kind]}</span>'
        for kind in picture.kinds
    )
    captions = "".join(
        f"<{tag}>{escape(text)}</{tag}>"
        for tag, text in zip(("h2", *["p"] * len(picture.captions)), picture.captions, strict=False)
    )
    return (
        f'<div class="timeline-page"><div class="t-bar"><div class="t-captions">{captions}</div>'
        f'<div class="t-zoom"><button data-zoom="0.6667" title="less">-</button><button data-zoom="0">fit</button>'
        f'<button data-zoom="1.5" title="more">+</button></div></div>'
        f'<div class="t-lanes"><div class="t-names" style="padding-top: {TOP}px"><div class="t-over">idle</div>'
        f"{''.join(rows)}"
        f'</div><div class="t-scroll"><svg class="timeline" width="{WIDTH}" height="{height + GAP}">{HATCH}{body}</svg>'
        f'</div></div><div class="t-legend">{legend}<span><i class="t-none"></i>idle</span>'
        f'<span><i class="t-thin"></i>arriving</span><span class="t-hint">wheel + Ctrl zooms, a click follows a '
        f'micro-batch</span></div><div class="t-tip" hidden></div></div>'
    )


def timeline_file(name: str) -> str:
    """One of the files of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
