"""What the forms are tried on: sizes, tokens, a model of words that computes each row by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS, TIME, WIDTH, HEADS, WORDS = 4, 16, 32, 4, 40
LAST = TIME - 1


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(WORDS, (ROWS, TIME), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    """Some do not count, unevenly."""
    found = tokens().roll(-1, 1)
    found[0, 3:9], found[2, :13], found[:, -1] = -100, -100, -100
    return found


def places() -> Tensor:
    return torch.arange(TIME)


class Words(nn.Module):
    """Tokens to logits, each by itself."""

    def __init__(self, way: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def hidden(self, x: Tensor) -> Tensor:
        return self.mix(self.embed(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))
