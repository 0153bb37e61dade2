"""The one place where Python text is executed: text that autopar wrote a moment ago, never a file's.

Whoever writes such text puts into it the names of nodes (identifiers, checked where program text is parsed), numbers,
and names that it binds itself; functions come from the table of ops. A lint (S102, S307) keeps it the only one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CodeType
from typing import Any


def written_function(source: str, name: str, names: Mapping[str, Any], title: str) -> Any:
    """The function that a text defines. names: what the text refers to. title: in place of a file, for tracebacks."""
    namespace = dict(names)
    exec(_code(source, title), namespace)  # noqa: S102
    return namespace[name]


@functools.lru_cache(128)
def _code(source: str, title: str) -> CodeType:
    """The code of a text, made once: stages alike and products of other shapes say the same in other names."""
    return compile(source, f"<autopar {title}>", "exec")
