"""Find the user's line on which something changes, by running again line by line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from autopar.capture.refusals.location import Line, is_user_code, is_user_file


def line_that_changes(run: Callable[[], object], state: Callable[[], object]) -> Line | None:
    """The first line of the user's that makes `state()` another. Slow: only for a message."""
    return lines_that_change(run, [state])[0]


def lines_that_change(run: Callable[[], object], states: Sequence[Callable[[], object]]) -> list[Line | None]:
    """For each of several states the first line of the user's that makes it another, from one run."""
    lines: list[Line | None] = [None] * len(states)
    last: dict[FrameType, Line] = {}
    seen: dict[int, object] = {}

    def look(frame: FrameType, event: str, _argument: Any) -> Any:
        if all(lines) or not is_user_code(frame):
            return None
        for at, state in enumerate(states):
            now = None if lines[at] else state()
            if lines[at] is None and at in seen and now != seen[at]:  # by the line before
                lines[at] = _before(frame, last)
            seen[at] = now
        last[frame] = (frame.f_code.co_filename, frame.f_lineno)
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(Exception):
            run()
    finally:
        sys.settrace(tracer)
        last.clear()  # the frames hold `look`, and all that they computed
    return lines


def _before(frame: FrameType | None, last: Mapping[FrameType, Line]) -> Line | None:
    """The line that ran before, here or in the nearest caller: in a file, if one of them is in one."""
    found = list[Line]()
    while frame is not None:
        if frame in last:
            found.append(last[frame])
        frame = frame.f_back
    return next((line for line in found if is_user_file(line[0])), found[0] if found else None)


def quoted(line: Line) -> str:
    """File and line, and the text of the line below them."""
    filename, number = line
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}\n    {text}\n" if text else f"{filename}:{number}\n"
