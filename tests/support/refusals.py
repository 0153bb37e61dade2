"""What tests of errors share: the exact text of a refusal, and the lines that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import AutoparError


def refused(error: type[AutoparError], message: str, call: Callable[[], object]) -> None:
    """Raises exactly this, of a class of ours; the message ends a sentence."""
    with pytest.raises(AutoparError) as found:
        call()
    assert type(found.value) is error
    assert str(found.value) == message


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line of a function's source that holds a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)
