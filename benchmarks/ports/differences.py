"""Make and apply the difference of a plain script and its port, and count its lines."""

from __future__ import annotations

import difflib
import re

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


def difference(name: str, plain: str, port: str) -> str:
    """The unified diff of two texts, with one line around each change."""
    lines = difflib.unified_diff(
        plain.splitlines(), port.splitlines(), f"{name}.py", f"{name}_autopar.py", n=1, lineterm=""
    )
    return "\n".join(lines) + "\n"


def applied(plain: str, diff: str) -> str:
    """The port: the plain script with a diff applied. A ValueError where the diff is of another script."""
    lines, port, at = plain.splitlines(), [], 0
    for line in diff.splitlines():
        hunk = _HUNK.match(line)
        if hunk:
            start = int(hunk.group(1)) - 1
            port += lines[at:start]
            at = start
        elif line.startswith(("---", "+++")):
            continue
        elif line.startswith("+"):
            port.append(line[1:])
        else:
            if lines[at] != line[1:]:
                raise ValueError(
                    f"line {at + 1} of the script is {lines[at]!r}, and {line[1:]!r} in its diff: write the diff anew"
                )
            port += [line[1:]] if line.startswith(" ") else []
            at += 1
    return "\n".join(port + lines[at:]) + "\n"


def changed(diff: str) -> int:
    """How many lines change: those that go or those that come, whichever are more, place by place. Empty lines and the
    line that describes the script do not count."""
    total = gone = come = 0
    for line in [*diff.splitlines()[2:], "@@"]:
        if line[:1] in "+-" and line[1:].strip() and '"""' not in line:
            gone, come = gone + (line[0] == "-"), come + (line[0] == "+")
        elif line[:1] not in "+-":
            total, gone, come = total + max(gone, come), 0, 0
    return total
