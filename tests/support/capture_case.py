"""How small programs of users are told: each with what a capture says of it. `# HERE` marks the line to be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Body = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A forward or a loss: `outcome` is refused, noted, guarded or works; `said` is what message or note have in it."""

    body: Body
    outcome: str
    said: tuple[str, ...] = ()


def refused(*said: str) -> Callable[[Body], Case]:
    return lambda body: Case(body, "refused", said)


def noted(*said: str) -> Callable[[Body], Case]:
    return lambda body: Case(body, "noted", said)


def guarded(body: Body) -> Case:
    """The truth of data that each step checks."""
    return Case(body, "guarded")


def works(body: Body) -> Case:
    return Case(body, "works")


class Net(nn.Module):
    """A module whose forward is `body`; what the bodies keep on it is made here."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4, 4))
        self.plain = torch.ones(())
        self.counter = 0
        self.history: list[Any] = []
        self.cache: dict[str, Tensor] = {}
        self.kept: Tensor | None = None
        self.flag = False

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()
