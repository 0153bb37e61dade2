"""Steps: batches of other sizes and in other containers, accumulation, evaluation, metrics."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.journeys.actions import action
from benchmarks.journeys.models import output_of
from benchmarks.journeys.side import Side

SEEDS = st.integers(0, 5)


class BatchEncoding(Mapping[str, Any]):
    """A mapping that is no dict, as those of transformers."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass
class Rows:
    x: Tensor
    y: Tensor


Named = collections.namedtuple("Named", ["x", "y"])

CONTAINERS: Mapping[str, Any] = {
    "dict": lambda x, y: ({"x": x, "y": y},),
    "dataclass": lambda x, y: (Rows(x, y),),
    "namedtuple": lambda x, y: (Named(x, y),),
    "mapping": lambda x, y: (BatchEncoding({"x": x, "y": y}),),
    "namespace": lambda x, y: (types.SimpleNamespace(x=x, y=y),),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
}


@action("ready", seed=SEEDS)
def forward_backward(side: Side, seed: int) -> Tensor:
    return side.forward_backward(*side.batch(12, seed))


@action("ready", "optimizer", seed=SEEDS, partial=True)
def train(side: Side, seed: int) -> Tensor:
    """A whole step of a loop."""
    assert side.optimizer is not None
    side.optimizer.zero_grad()
    loss = side.forward_backward(*side.batch(12, seed))
    side.optimizer.step()
    return loss


@action("ready", "stepped", "!local", seed=SEEDS)
def last_batch(side: Side, seed: int) -> Tensor:
    """The few rows at the end of an epoch."""
    return side.forward_backward(*side.batch(side.setup["rows"], seed))


@action("ready", seed=SEEDS, kind=st.sampled_from(sorted(CONTAINERS)), partial=True)
def in_a_container(side: Side, seed: int, kind: str) -> list[Tensor]:
    """Two batches of one container, one after the other."""
    return [side.forward_backward(*CONTAINERS[kind](*side.batch(12, seed + i))) for i in range(2)]


@action("ready", seed=SEEDS, parts=st.integers(2, 3), partial=True)
def accumulate(side: Side, seed: int, parts: int) -> list[Tensor]:
    return [side.forward_backward(*side.batch(12, seed + i)) for i in range(parts)]


@action("ready", seed=SEEDS)
def evaluate(side: Side, seed: int) -> Tensor:
    """The outputs of a batch in eval mode."""
    was = side.model.training
    side.model.eval()
    x, _ = side.batch(12, seed)
    try:
        with torch.no_grad():
            return output_of(side.model, x)
    finally:
        side.model.train(was)


@action("ready", "aux", seed=SEEDS)
def metrics(side: Side, seed: int) -> Any:
    """What a loss function returns beside the loss."""
    loss = side.forward_backward(*side.batch(12, seed))
    return [loss, dict(side.aux)]
