"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what they hold; the last one is as long as it is."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in (heads, *rows)
    )
