"""Recurrences of torch and a loop over positions, small and in float64: over cp they are chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.plain import BATCH, TIME, VOCABULARY, Case, ids, next_token

WIDTH = 12


class Recurrent(nn.Module):
    """Tokens, a recurrence of torch, and a head. has_positions_first: it reads [positions, samples], as torch's own
    recurrences do by default, and gives one list of rows."""

    def __init__(self, kind: type[nn.RNNBase], is_mirrored: bool = False, has_positions_first: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.core = kind(WIDTH, WIDTH, batch_first=not has_positions_first, bidirectional=is_mirrored)
        self.head = nn.Linear(WIDTH * (1 + is_mirrored), VOCABULARY)
        self.has_positions_first = has_positions_first

    def forward(self, x: Tensor) -> Tensor:
        if self.has_positions_first:
            return self.head(self.core(self.tokens(x.T))[0]).flatten(0, 1)
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


def _of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y.T.flatten())


def _case(make: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: (make(), next_token, (ids(BATCH, TIME), ids(BATCH, TIME)))


MODELS: Mapping[str, Callable[[], Case]] = {
    "rnn": _case(lambda: Recurrent(nn.RNN)),
    "gru both ways": _case(lambda: Recurrent(nn.GRU, is_mirrored=True)),
    "lstm both ways": _case(lambda: Recurrent(nn.LSTM, is_mirrored=True)),
    "cell in a loop": _case(Between),
}
POSITIONS_FIRST: Mapping[str, Callable[[], Case]] = {
    f"{name}, positions first": lambda kind=kind, is_mirrored=is_mirrored: (
        Recurrent(kind, is_mirrored, has_positions_first=True), _of_rows, (ids(BATCH, TIME), ids(BATCH, TIME)),
    )
    for name, kind, is_mirrored in (("rnn", nn.RNN, False), ("gru both ways", nn.GRU, True), ("lstm", nn.LSTM, False))
}  # fmt: skip
