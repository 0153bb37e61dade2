"""A training step as one module call, whose whole state is swapped for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Partner


class Step(nn.Module):
    """Spans forward and backward in one call, so that a functional call swaps the state for both."""

    def __init__(
        self, model: nn.Module, partners: Iterable[Partner], body: Callable[..., Any], replaced: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        for partner in partners:
            self.add_module(partner.name, partner.traced)
        self.body = body
        self.replaced = replaced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(tables.named_parameters(self, remove_duplicate=False))
        result = self.body(*args, **kwargs)
        for name, tensor in tables.named_parameters(self, remove_duplicate=False):
            if given.get(name, tensor) is not tensor:
                self.replaced[name] = tensor
        return result
