"""The table of docs/spellings.md: how many ways of each form are reached, and which are not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.spellings.form import LOST, REACHED, REFUSED, TOLD, Form, Outcome

HEAD = "| form | ways | reached | a note | refused | which are not reached |\n|---|---|---|---|---|---|\n"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
_ROW = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)


def rows_of(form: Form, found: Sequence[Outcome]) -> str:
    """The row of a form; one of `LOST` is no cell, for there is to be none."""
    count = {result: sum(one.result == result for one in found) for result in (REACHED, TOLD, REFUSED, LOST)}
    others = ", ".join(f"`{one.way.replace('|', chr(92) + '|')}`" for one in found if one.result != REACHED)
    cells = (form.title, len(found), count[REACHED], count[TOLD], count[REFUSED], others)
    return f"| {' | '.join(map(str, cells))} |"


def with_table(page: str, found: Mapping[Form, Sequence[Outcome]]) -> str:
    """The page with these rows."""
    return _TABLE.sub(lambda _: HEAD + "".join(f"{rows_of(form, of)}\n" for form, of in found.items()), page)


def counts_in(page: str) -> dict[str, tuple[int, ...]]:
    """Ways, and those that are reached, told of and refused, of each form of a page."""
    return {title: tuple(map(int, counts)) for title, *counts in _ROW.findall(page)}
