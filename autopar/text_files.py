"""Read the text and TOML files that a user names: whatever is wrong with one is an error with its name.

These files come from other people. What Python's own readers raise on hostile ones (a NUL in a path, an integer of
5,000 digits, tables nested a thousand deep) is no crash and no traceback here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError

_MOST_BYTES = 64 << 20  # of a file that a person writes, or a machine file, a plan or a table
Kind = type[AutoparError]


def read_text(path: Path, what: str, error: Kind) -> str:
    """The text of a file in UTF-8.

    what: the file in words, e.g. "plan". error: is raised with it and the path.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise error(f"{what} {_quoted(path)} is a folder or a device, and no file.")
        if size > _MOST_BYTES:
            raise error(f"{what} {_quoted(path)} has {size} bytes; such a file has {_MOST_BYTES} at most.")
        return path.read_text(encoding="utf-8")
    except OSError as fault:
        raise error(f"{what} {_quoted(path)}: {fault.strerror or fault}.") from None
    except UnicodeDecodeError as fault:
        raise error(f"{what} {_quoted(path)} is no text in UTF-8: {fault.reason} at byte {fault.start}.") from None
    except ValueError as fault:  # a NUL in the path
        raise error(f"{what} {_quoted(path)}: {fault}.") from None


def read_toml(path: Path, what: str, error: Kind) -> dict[str, Any]:
    """The table of a TOML file; raises as `read_text` does."""
    text = read_text(path, what, error)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{what} {_quoted(path)} is no TOML that can be read: it is nested too deep.") from None
    except ValueError as fault:  # of an integer with thousands of digits, too
        raise error(f"{what} {_quoted(path)} is no TOML: {fault}.") from None


def _quoted(path: Path) -> str:
    """A path on one line, whatever it holds."""
    text = str(path)
    return f"'{text}'" if text.isprintable() else repr(text)
