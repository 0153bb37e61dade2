"""Ways to leave the last position of a sequence out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spellings.data import LAST, ROWS, TIME, WORDS


def shifted(way: Callable[[Tensor], Tensor]) -> Any:
    return lambda m, x: F.cross_entropy(way(m(x)).flatten(0, 1), x[:, 1:].flatten())


SHIFTS: Mapping[str, Any] = {
    "x[:, :-1]": lambda x: x[:, :-1],
    "x[..., :-1, :].contiguous()": lambda x: x[..., :-1, :].contiguous(),
    "x[:, 0:-1, :]": lambda x: x[:, 0:-1, :],
    "x[:, slice(None, -1)]": lambda x: x[:, slice(None, -1)],
    "x.narrow(1, 0, n - 1)": lambda x: x.narrow(1, 0, x.shape[1] - 1),
    "x.split([n - 1, 1], 1)[0]": lambda x: x.split([LAST, 1], 1)[0],
    "x.tensor_split([n - 1], 1)[0]": lambda x: x.tensor_split([LAST], 1)[0],
    "torch.split(x, n - 1, 1)[0]": lambda x: torch.split(x, LAST, 1)[0],
    "x[:, torch.arange(n - 1)]": lambda x: x[:, torch.arange(LAST)],
    "x[:, list(range(n - 1))]": lambda x: x[:, list(range(LAST))],
    "x.index_select(1, torch.arange(n - 1))": lambda x: x.index_select(1, torch.arange(LAST)),
    "x[:, torch.arange(n) < n - 1]": lambda x: x[:, torch.arange(TIME) < LAST],
    "F.pad(x, (0, 0, 0, -1))": lambda x: F.pad(x, (0, 0, 0, -1)),
    "torch.stack(x.unbind(1)[:-1], 1)": lambda x: torch.stack(x.unbind(1)[:-1], 1),
    "torch.cat(x.split(1, 1)[:-1], 1)": lambda x: torch.cat(x.split(1, 1)[:-1], 1),
    "x.transpose(0, 1)[:-1].transpose(0, 1)": lambda x: x.transpose(0, 1)[:-1].transpose(0, 1),
    "x.mT[..., :-1].mT": lambda x: x.mT[..., :-1].mT,
    "as_strided": lambda x: torch.as_strided(x, (ROWS, LAST, WORDS), (TIME * WORDS, WORDS, 1)),
    "torch.take_along_dim": lambda x: torch.take_along_dim(x, torch.arange(LAST)[None, :, None], 1),
    "x.gather(1, index)": lambda x: x.gather(1, torch.arange(LAST)[None, :, None].expand(ROWS, LAST, WORDS)),
    "x.roll(1, 1)[:, 1:]": lambda x: x.roll(1, 1)[:, 1:],
    "torch.stack([x[:, t] for t in range(n - 1)], 1)": lambda x: torch.stack([x[:, t] for t in range(LAST)], 1),
    "x.unfold(1, n - 1, 1)[:, 0]": lambda x: x.unfold(1, LAST, 1)[:, 0].mT,
    "einops-like reshape": lambda x: x.reshape(ROWS, TIME, 4, WORDS // 4)[:, :-1].reshape(ROWS, LAST, WORDS),
}
LABELS: Mapping[str, Any] = {
    "labels[:, 1:]": lambda m, x: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
    "F.pad(labels, (0, 1))": lambda m, x: F.cross_entropy(
        m(x).flatten(0, 1), F.pad(x, (0, 1), value=-100)[:, 1:].flatten()
    ),
    "roll, the last is ignored": lambda m, x: F.cross_entropy(
        m(x).flatten(0, 1), x.roll(-1, 1).masked_fill(torch.arange(TIME) == LAST, -100).flatten()
    ),
    "cat of a column": lambda m, x: F.cross_entropy(
        m(x).flatten(0, 1), torch.cat([x[:, 1:], torch.full((ROWS, 1), -100)], 1).flatten()
    ),
    "new_full, written into": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), written(x).flatten()),
    "losses[:, :-1]": lambda m, x: F.cross_entropy(m(x).mT, x.roll(-1, 1), reduction="none")[:, :-1].mean(),
    "hidden[:, :-1]": lambda m, x: F.cross_entropy(m.head(m.hidden(x)[:, :-1]).flatten(0, 1), x[:, 1:].flatten()),
    "log-probabilities[:, :-1]": lambda m, x: -m(x).log_softmax(-1)[:, :-1].gather(2, x[:, 1:, None]).mean(),
    "a mask times losses": lambda m, x: (
        (F.cross_entropy(m(x).mT, x.roll(-1, 1), reduction="none") * (torch.arange(TIME) < LAST)).sum() / (ROWS * LAST)
    ),
    "tokens[:, :-1] go in": lambda m, x: F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()),
}


def written(x: Tensor) -> Tensor:
    found = x.new_full(x.shape, -100)
    found[:, :-1] = x[:, 1:]
    return found
