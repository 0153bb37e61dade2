"""Find the user's line on which something changes, by running again line by line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from autopar.capture.refusals.location import Line, is_user_file


def line_that_changes(run: Callable[[], object], state: Callable[[], object]) -> Line | None:
    """The first line of the user's that makes `state()` another. Slow: only for a message."""
    lines: list[Line] = []
    last: dict[FrameType, Line] = {}
    seen: list[object] = []

    def look(frame: FrameType, event: str, _argument: Any) -> Any:
        if lines or not is_user_file(frame.f_code.co_filename):
            return None
        now = state()
        if seen and now != seen[-1]:  # by the line before, here or in the nearest caller
            caller: FrameType | None = frame
            while caller is not None and caller not in last:
                caller = caller.f_back
            if caller is not None:
                lines.append(last[caller])
                return None
        seen[:] = [now]
        last[frame] = (frame.f_code.co_filename, frame.f_lineno)
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(Exception):
            run()
    finally:
        sys.settrace(tracer)
    return lines[0] if lines else None


def quoted(line: Line) -> str:
    """File and line, and the text of the line below them."""
    filename, number = line
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}\n    {text}\n" if text else f"{filename}:{number}\n"
