"""The models, and the ways in which they are trained on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare import models as language

RANKS = 2
IMAGES, SIDE, CLASSES, CHANNELS, BLOCKS = 32, 32, 100, 64, 4
Options = dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """A model on a mesh of two ranks, with options of `parallelize`."""

    model: str
    mesh: str
    options: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join((self.model, self.mesh, *(f"{name}={value}" for name, value in self.options.items())))


def configurations() -> list[Configuration]:
    """All of them, those of a model one behind the other."""
    found = [Configuration(model, *way) for model in ("gpt", "llama") for way in (*_data(), *_tensor(), *_pipeline())]
    return [*found, *(Configuration("conv", *way) for way in (*_data(), *_tensor(False), *_pipeline()))]


def _data() -> Iterator[tuple[str, Options]]:
    yield from (("dp=2", {"zero": zero}) for zero in range(4))
    yield "dp=2", {"zero": 0, "recompute": "full"}
    yield "dp=2", {"zero": 0, "microbatches": 4}
    yield "dp=2", {"zero": 2, "microbatches": 2, "recompute": "selective"}
    yield "dp=2", {"zero": 3, "recompute": "full"}


def _tensor(has_sequence: bool = True) -> Iterator[tuple[str, Options]]:
    for options in ({}, {"recompute": "full"}, {"microbatches": 4}):
        yield "tp=2", options
    if has_sequence:
        yield "tp=2", {"sequence_parallel": True}
        yield "tp=2", {"sequence_parallel": True, "recompute": "full"}


def _pipeline() -> Iterator[tuple[str, Options]]:
    yield from (("pp=2", {"microbatches": count}) for count in (2, 4, 8))
    yield "pp=2", {"microbatches": 4, "recompute": "full"}


class Residual(nn.Module):
    """Two convolutions around which the value goes; norms by groups, since those of a batch see no whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = (nn.GroupNorm(8, CHANNELS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.first(x)))
        return F.relu(x + self.norm_2(self.second(y)))


def convolutional() -> nn.Module:
    stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
    blocks = nn.Sequential(*(Residual() for _ in range(BLOCKS)))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))


def model_of(name: str) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return convolutional() if name == "conv" else language.model_of(name)


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    if name != "conv":
        return language.batch_of(name, "cpu")
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (IMAGES,), generator=random)
    return torch.randn(IMAGES, 3, SIDE, SIDE, generator=random), labels


def loss_of(name: str) -> Any:
    return class_loss if name == "conv" else language.loss_fn


def class_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)
