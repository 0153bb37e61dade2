"""Recurrences of torch and a loop over positions, small and in float64: over cp they are chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks.coverage.plain import BATCH, TIME, VOCABULARY, Case, ids, next_token

WIDTH = 12


class Recurrent(nn.Module):
    """Tokens, a recurrence of torch, and a head."""

    def __init__(self, kind: type[nn.RNNBase], is_mirrored: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.core = kind(WIDTH, WIDTH, batch_first=True, bidirectional=is_mirrored)
        self.head = nn.Linear(WIDTH * (1 + is_mirrored), VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.tokens(x))[0])


class Between(nn.Module):
    """A loop over a cell of torch, between layers that look at a position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h, state, found = (
            torch.tanh(self.up(self.tokens(x))),
            x.new_zeros(len(x), WIDTH, dtype=self.up.weight.dtype),
            [],
        )
        for row in h.unbind(1):
            state = self.cell(row, state)
            found.append(state)
        return self.head(h + torch.stack(found, 1))


def _case(make: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: (make(), next_token, (ids(BATCH, TIME), ids(BATCH, TIME)))


MODELS: Mapping[str, Callable[[], Case]] = {
    "rnn": _case(lambda: Recurrent(nn.RNN)),
    "gru both ways": _case(lambda: Recurrent(nn.GRU, is_mirrored=True)),
    "lstm both ways": _case(lambda: Recurrent(nn.LSTM, is_mirrored=True)),
    "cell in a loop": _case(Between),
}
