"""A call of a torch function while a model is captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from autopar.capture.data.known_values import Operands
from autopar.capture.refusals.location import Line, Place, user_frame


@dataclass(slots=True)
class ModelCall:
    """One call of a torch function, as each interceptor leaves it to the next one."""

    function: Any
    args: Any
    kwargs: Any
    frame: FrameType  # that calls it
    place: Place = ("", "", "")  # that its nodes are charged to
    before: Operands = field(default_factory=Operands)
    asked: tuple[Any, Any, Any] | None = None  # the user's own call, where another is made in its place

    @property
    def line(self) -> Line | None:
        """The user's line that it stands on."""
        return user_frame(self.frame)
