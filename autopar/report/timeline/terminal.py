"""A timeline in the terminal: a row a rank, time to the right, a colour for each kind of action."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.report.timeline.picture import (
    COLOURS,
    KIND_NAMES,
    OTHER,
    Colour,
    Lane,
    Picture,
    TimeBlock,
    ticks,
    time_text,
)

_IDLE = (58, 62, 72)
_RIGHT = 12  # columns for the share of idleness


@dataclass(frozen=True, slots=True)
class StyledText:
    """Texts, each with a style in rich's words. rich itself is imported where something is printed: its import draws
    from Python's random numbers, which are the user's."""

    parts: list[tuple[str, str]] = field(default_factory=list)

    def append(self, text: str, style: str = "") -> None:
        self.parts.append((text, style))

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)


def timeline_text(picture: Picture, width: int, colour: bool) -> StyledText:
    """The drawing in `width` columns; without colours actions are letters: F3 forward of micro-batch 3."""
    names = [lane.name for lane in picture.lanes]
    left = max(map(len, names), default=0) + 1
    columns = max(width - left - _RIGHT, 20)
    text = StyledText()
    for caption in picture.captions:
        text.append(f"{caption}\n")
    text.append("\n")
    for lane, name in zip(picture.lanes, names, strict=True):
        text.append(name.rjust(left - 1) + " ", "dim" * lane.measured)
        draw = _coloured if colour else _letters
        text.parts.extend(draw(lane, picture.end_us, columns).parts)
        text.append(f"  idle {lane.idle:5.1%}\n" if lane.idle < 0.9995 else "  idle  100%\n")
    text.append(" " * left + _axis(picture.end_us, columns) + "\n\n")
    text.append(" " * left)
    for kind in picture.kinds:
        if colour:
            text.append("  ", _style(COLOURS.get(kind, OTHER)[0]))
        text.append(f" {kind} {KIND_NAMES[kind]}   ")
    if colour:
        text.append("░░", _hex(_IDLE))
    text.append(" idle" if colour else " . idle")
    return text


def _cells(lane: Lane, end_us: float, count: int) -> list[TimeBlock | None]:
    """What a lane does most in each of so many equal times."""
    shares: list[dict[int, float]] = [{} for _ in range(count)]
    size = end_us / count if end_us else 1.0
    for i, block in enumerate(lane.blocks):
        if block.row:  # of a pair the first is shown
            continue
        first, last = int(block.start_us / size), min(int(block.end_us / size), count - 1)
        for cell in range(first, last + 1):
            share = min(block.end_us, (cell + 1) * size) - max(block.start_us, cell * size)
            if share > 0:
                shares[cell][i] = share
    cells: list[TimeBlock | None] = []
    for split in shares:
        best = max(split, key=split.__getitem__, default=None)
        cells.append(lane.blocks[best] if best is not None and sum(split.values()) >= size / 2 else None)
    return cells


def _runs(cells: list[TimeBlock | None]) -> list[tuple[TimeBlock | None, int, int]]:
    """Neighbours that show the same block: (block, first cell, number of cells)."""
    runs: list[tuple[TimeBlock | None, int, int]] = []
    for i, cell in enumerate(cells):
        if runs and runs[-1][0] is cell:
            block, start, length = runs[-1]
            runs[-1] = block, start, length + 1
        else:
            runs.append((cell, i, 1))
    return runs


def _letters(lane: Lane, end_us: float, columns: int) -> StyledText:
    found = []
    for block, _, length in _runs(_cells(lane, end_us, columns)):
        if block is None:
            found.append("." * length)
            continue
        label = block.label if len(block.label) <= length else block.action.kind
        found.append(label.ljust(length, "-"))
    return StyledText([("".join(found), "")])


def _coloured(lane: Lane, end_us: float, columns: int) -> StyledText:
    """Two cells in a column, left and right, for twice the sharpness; a number where it fits in."""
    cells = _cells(lane, end_us, 2 * columns)
    labels: dict[int, tuple[str, TimeBlock]] = {}
    for block, start, length in _runs(cells):
        if block is None:
            continue
        first, last = (start + 1) // 2, (start + length) // 2  # the columns that are its own
        if last - first > len(block.number):
            labels |= {first + 1 + i: (letter, block) for i, letter in enumerate(block.number)}
            labels.setdefault(first, ("▏", block))
    text = StyledText()
    for column in range(columns):
        one, other = cells[2 * column], cells[2 * column + 1]
        if column in labels:
            letter, block = labels[column]
            ink = block.ink if letter != "▏" else _darker(block.colour, 6)
            text.append(letter, _style(_colour(block), ink))
        elif one is None and other is None:
            text.append("░", _hex(_IDLE))
        else:
            text.append("▌", _style(_colour(other), _colour(one)))
    return text


def _colour(block: TimeBlock | None) -> Colour:
    """The colour of a block, odd micro-batches a little darker, so that neighbours are told apart without numbers."""
    if block is None:
        return _IDLE
    return _darker(block.colour, 8) if block.action.microbatch % 2 and block.action.kind in "FBIW" else block.colour


def _darker(colour: Colour, tenths: int) -> Colour:
    red, green, blue = colour
    return red * tenths // 10, green * tenths // 10, blue * tenths // 10


def _style(background: Colour, ink: Colour | None = None) -> str:
    return f"{_hex(ink) if ink else ''} on {_hex(background)}".strip()


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _axis(end_us: float, columns: int) -> str:
    line = [" "] * (columns + _RIGHT)
    for time in ticks(end_us, max(columns // 16, 2)):
        place = round(time / end_us * columns) if end_us else 0
        label = f"|{time_text(time)}"
        line[place : place + len(label)] = label
    return "".join(line).rstrip()
