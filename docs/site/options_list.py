"""A Griffe extension: the lines "name: meaning" of our docstrings become a list on the reference page."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (?=\S)", re.MULTILINE)


class OptionsList(griffe.Extension):
    """Rewrite each docstring when its object is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by Griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """as_list("a: the first\\n  of two\\nb: the second") == "- **a**: the first\\n  of two\\n- **b**: the second" """
    listed = OPTION.sub(lambda match: f"- **{match[1]}**: ", text)
    return re.sub(r"(?m)(?<=\S)\n(?=- \*\*)", "\n", re.sub(r"(?m)^(?!- )(\S.*)\n(?=- \*\*)", r"\1\n\n", listed))
