"""A timeline as SVG: a picture by itself, and what the page zooms into."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib import resources

from autopar.report.timeline.picture import COLOURS, KIND_NAMES, OTHER, Lane, Picture, TimeBlock, ticks, time_text

WIDTH, LEFT, RIGHT = 1400, 96, 92
TOP, GAP, MESSAGE = 26, 8, 4  # above the lanes, between ranks, of the strip of messages
CHARACTER = 7.0  # of a label
MOST_MESSAGES = 6000  # more of them are not drawn: nobody could tell them apart


def lane_height(lane: Lane) -> int:
    return 24 if lane.measured else 28


def timeline_svg(picture: Picture, width: int = WIDTH) -> str:
    """A whole SVG file, with names, captions and a legend; it asks no network for anything."""
    lines = len(picture.captions)
    body, height = lanes_svg(picture, LEFT, width - LEFT - RIGHT, 20 * lines + 18)
    names = "\n".join(_names(picture, width, 20 * lines + 18))
    captions = "\n".join(
        f'<text class="{"head" if i == 0 else "caption"}" x="16" y="{24 + 20 * i}">{escape(caption)}</text>'
        for i, caption in enumerate(picture.captions)
    )
    legend = "\n".join(_legend(picture, height + 22))
    total = height + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" viewBox="0 0 {width} {total}" '
        f'role="img" class="timeline">\n<style>\n{style(picture)}</style>\n{HATCH}'
        f'<rect class="paper" width="{width}" height="{total}"/>\n{captions}\n{names}\n{body}\n{legend}\n</svg>\n'
    )


HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="idle" width="6" height="6"/><rect class="stripe" width="1.5" height="6"/></pattern></defs>\n'
)


def style(picture: Picture) -> str:
    """The style of the blocks: a class for each kind and chunk."""
    found = {(block.action.kind, block.chunk): block for lane in picture.lanes for block in lane.blocks}
    rules = [resources.files(__package__).joinpath("timeline.css").read_text(encoding="utf-8")]
    for (kind, chunk), block in sorted(found.items()):
        rules.append(f".{kind}{chunk} {{ fill: rgb{block.colour}; }} text.{kind}{chunk} {{ fill: rgb{block.ink}; }}\n")
    return "".join(rules)


def lanes_svg(picture: Picture, left: float, width: float, top: int, all_labels: bool = False) -> tuple[str, int]:
    """The lanes with their grid, and where they end. all_labels: also those that do not fit, for a page that zooms."""
    scale = width / picture.end_us if picture.end_us else 0.0
    height = top + TOP + sum(lane_height(lane) + gap(picture, i) for i, lane in enumerate(picture.lanes))
    parts = [
        f'<g class="tick"><line x1="{left + time * scale:.2f}" x2="{left + time * scale:.2f}" y1="{top + TOP - 6}" '
        f'y2="{height}"/><text x="{left + time * scale:.2f}" y="{top + TOP - 10}">{time_text(time)}</text></g>'
        for time in ticks(picture.end_us, 14)
    ]
    letters = not all_labels and all(_fits(block, scale) for lane in picture.lanes for block in lane.blocks)
    messages = sum(len(lane.messages) for lane in picture.lanes) <= MOST_MESSAGES
    y = top + TOP
    for i, lane in enumerate(picture.lanes):
        tall = lane_height(lane)
        parts.append(
            f'<rect class="wait" x="{left:.2f}" y="{y}" width="{width:.2f}" height="{tall - MESSAGE - 1}" '
            f'fill="url(#hatch)"/>'
        )
        for block in lane.blocks:
            parts += _block(block, left, scale, y, tall - MESSAGE - 1, letters, all_labels)
        if messages:
            parts += [_message(block, left, scale, y + tall - MESSAGE) for block in lane.messages]
        y += tall + gap(picture, i)
    return "\n".join(parts), height


def gap(picture: Picture, place: int) -> int:
    """Lanes of one rank stand close together."""
    following = picture.lanes[place + 1 : place + 2]
    return 1 if following and following[0].rank == picture.lanes[place].rank else GAP


def _fits(block: TimeBlock, scale: float) -> bool:
    """True if there is room for kind and micro-batch, or nothing to tell."""
    width = (block.end_us - block.start_us) * scale
    return block.action.kind not in "FBIW" or width >= CHARACTER * len(block.label) + 4


def _block(
    block: TimeBlock, left: float, scale: float, y: int, height: int, letters: bool, all_labels: bool
) -> Iterator[str]:
    x, width = left + block.start_us * scale, (block.end_us - block.start_us) * scale
    y, height = y + height * block.row // block.rows, height // block.rows
    name = f"{block.action.kind}{block.chunk}"
    round_ = ' rx="2"' if width > 6 else ""
    seen = max(width - 0.8, 0.3) if width > 3 else max(width, 0.3)
    yield (
        f'<rect class="b {name} m{block.action.microbatch}" x="{x:.2f}" y="{y}" width="{seen:.2f}" '
        f'height="{height}"{round_}>'
        f"<title>{escape(block.title())}</title></rect>"
    )
    label = block.label if letters else block.number
    if all_labels or width >= CHARACTER * len(label) + 2:
        where = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.1f}"'
        yield f'<text class="l {name} m{block.action.microbatch}" {where}>{label}</text>'


def _message(block: TimeBlock, left: float, scale: float, y: int) -> str:
    x, width = left + block.start_us * scale, max((block.end_us - block.start_us) * scale, 1.0)
    title = escape(block.title())
    return (
        f'<rect class="msg m{block.action.microbatch}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{MESSAGE - 1}">'
        f"<title>{title}</title></rect>"
    )


def _names(picture: Picture, width: int, top: int) -> Iterator[str]:
    y = top + TOP
    for i, lane in enumerate(picture.lanes):
        tall = lane_height(lane)
        middle = y + (tall - MESSAGE) / 2 + 4
        yield f'<text class="name{" measured" * lane.measured}" x="{LEFT - 10}" y="{middle}">{escape(lane.name)}</text>'
        yield f'<text class="share" x="{width - RIGHT + 12}" y="{middle}">idle {lane.idle:.1%}</text>'
        y += tall + gap(picture, i)


def _legend(picture: Picture, y: int) -> Iterator[str]:
    x = LEFT
    for kind in picture.kinds:
        colour = COLOURS.get(kind, OTHER)[0]
        text = f"{kind}  {KIND_NAMES[kind]}"
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="rgb{colour}"/>'
        yield f'<text class="caption" x="{x + 18}" y="{y}">{text}</text>'
        x += 18 + 7 * len(text) + 22
    yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="url(#hatch)"/>'
    yield f'<text class="caption" x="{x + 18}" y="{y}">idle</text>'
    if any(lane.messages for lane in picture.lanes):
        yield f'<rect class="msg" x="{x + 70}" y="{y - 5}" width="16" height="3"/>'
        yield f'<text class="caption" x="{x + 92}" y="{y}">arriving</text>'
