"""Ways to write cross entropies, and means over the tokens that count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.spellings.data import ROWS, TIME, WORDS


def one_hot_loss(m: nn.Module, x: Tensor) -> Tensor:
    return -(F.one_hot(x, WORDS) * m(x).log_softmax(-1)).sum(-1).mean()


LOSSES: Mapping[str, Any] = {
    "F.cross_entropy": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
    "classes second": lambda m, x: F.cross_entropy(m(x).transpose(1, 2), x),
    "nn.CrossEntropyLoss": lambda m, x: nn.CrossEntropyLoss()(m(x).view(-1, WORDS), x.view(-1)),
    "log_softmax, nll_loss": lambda m, x: F.nll_loss(F.log_softmax(m(x), -1).flatten(0, 1), x.flatten()),
    "log_softmax, gather": lambda m, x: -m(x).log_softmax(-1).gather(-1, x[..., None]).mean(),
    "logsumexp - gather": lambda m, x: (lambda y: (y.logsumexp(-1) - y.gather(-1, x[..., None])[..., 0]).mean())(m(x)),
    "log_softmax, one-hot": one_hot_loss,
    "softmax().log(), gather": lambda m, x: -m(x).softmax(-1).log().gather(-1, x[..., None]).mean(),
    "log_softmax, indices": lambda m, x: (
        -m(x).flatten(0, 1).log_softmax(-1)[torch.arange(ROWS * TIME), x.flatten()].mean()
    ),
    "take_along_dim": lambda m, x: -torch.take_along_dim(m(x).log_softmax(-1), x[..., None], -1).mean(),
    "Categorical.log_prob": lambda m, x: (
        -torch.distributions.Categorical(logits=m(x), validate_args=False).log_prob(x).mean()
    ),
    "target of probabilities": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), F.one_hot(x.flatten(), WORDS).double()),
    "max taken out by hand": lambda m, x: (
        lambda y: (
            (y - y.amax(-1, True)).exp().sum(-1).log() - (y - y.amax(-1, True)).gather(-1, x[..., None])[..., 0]
        ).mean()
    )(m(x)),
    "F.kl_div of one-hot": lambda m, x: F.kl_div(
        m(x).log_softmax(-1).flatten(0, 1), F.one_hot(x.flatten(), WORDS).double(), reduction="batchmean"
    ),
    "reduction='none', mean": lambda m, x: F.cross_entropy(m(x).mT, x, reduction="none").mean(),
    "logits.float()": lambda m, x: F.cross_entropy(m(x).flatten(0, 1).double(), x.flatten()),
    "a loop over samples": lambda m, x: torch.stack(
        [F.cross_entropy(y, z) for y, z in zip(m(x), x, strict=True)]
    ).mean(),
}


# -- counts of tokens


def each(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x).mT, y.clamp(min=0), reduction="none")


def total(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum")


COUNTS: Mapping[str, Any] = {
    "ignore_index": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    "(y != -100).sum()": lambda m, x, y: total(m, x, y) / (y != -100).sum(),
    ".sum().clamp(min=1)": lambda m, x, y: total(m, x, y) / (y != -100).sum().clamp(min=1),
    "mask.float().sum()": lambda m, x, y: (each(m, x, y) * (y >= 0)).sum() / (y >= 0).float().sum(),
    "count_nonzero": lambda m, x, y: total(m, x, y) / torch.count_nonzero(y + 100),
    "numel - ignored": lambda m, x, y: total(m, x, y) / (y.numel() - (y == -100).sum()),
    "masked_fill, sum": lambda m, x, y: each(m, x, y).masked_fill(y < 0, 0.0).sum() / y.ge(0).sum(),
    "torch.where, sum": lambda m, x, y: torch.where(y >= 0, each(m, x, y), 0.0).sum() / (y >= 0).sum(),
    "mean * numel / count": lambda m, x, y: (each(m, x, y) * (y >= 0)).mean() * y.numel() / (y >= 0).sum(),
    "mean / mean": lambda m, x, y: (each(m, x, y) * (y >= 0)).mean() / (y >= 0).double().mean(),
    "of each sample, then the mean": lambda m, x, y: (
        (each(m, x, y) * (y >= 0)).sum(1) / (y >= 0).sum(1).clamp(min=1)
    ).mean(),
    "weights that add up to 1": lambda m, x, y: (each(m, x, y) * ((y >= 0) / (y >= 0).sum())).sum(),
    "(y >= 0).sum(-1).sum()": lambda m, x, y: total(m, x, y) / (y >= 0).sum(-1).sum(),
    "einsum": lambda m, x, y: torch.einsum("bt,bt->", each(m, x, y), (y >= 0).double()) / (y >= 0).sum(),
    "losses[mask].mean()": lambda m, x, y: each(m, x, y)[y >= 0].mean(),
    "masked_select": lambda m, x, y: torch.masked_select(each(m, x, y), y >= 0).mean(),
    "nanmean": lambda m, x, y: each(m, x, y).masked_fill(y < 0, math.nan).nanmean(),
    "len(y[y >= 0])": lambda m, x, y: total(m, x, y) / len(y[y >= 0]),
    ".sum().item()": lambda m, x, y: total(m, x, y) / (y != -100).sum().item(),
    "nonzero": lambda m, x, y: total(m, x, y) / (y >= 0).nonzero().shape[0],
    "torch.mean(losses, where)": lambda m, x, y: (each(m, x, y) * (y >= 0)).sum().div((y >= 0).sum()),
}
